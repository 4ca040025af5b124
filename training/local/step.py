"""The step of local training: one batch forward and back, the terms of the algorithm, the local optimizer.

A worker takes the steps of one client; the simulator takes the steps of many clients in turn, in one model.
"""

from collections.abc import Callable, Sequence
from typing import Any

import torch

from atoll.task.local import Local
from atoll.task.metrics import Statistics, add, of_batch
from atoll.task.task import Task
from atoll.training.data.trees import map_tensors
from atoll.training.data.units import units_of
from atoll.training.local.client import TrainingClient
from atoll.training.optimizers.custom_optimizer import custom_optimizer
from atoll.training.optimizers.make import decay_groups
from atoll.training.private.noised_gradients import NoisedGradients
from atoll.training.trials.contract import one_loss
from atoll.training.trials.same_form import SameForm
from atoll.training.trials.unit_check import check_of


def make_optimizer(local: Local, parameters: list[torch.nn.Parameter]) -> torch.optim.Optimizer:
    """Return the optimizer that `local` names, with a fresh state.

    Raises:
        TaskBroken: a custom optimizer cannot be made.
    """
    if local.has_custom_optimizer:
        return custom_optimizer(local, parameters)
    groups = decay_groups(parameters, spares_vectors=not local.decay_vectors)
    if local.optimizer == "sgd":
        return torch.optim.SGD(groups, lr=local.lr, momentum=local.momentum, weight_decay=local.weight_decay)
    kind = torch.optim.Adam if local.optimizer == "adam" else torch.optim.AdamW
    return kind(groups, lr=local.lr, weight_decay=local.weight_decay)


class Descent:
    """The local optimizer of successive clients: built once, and reset for each client.

    FedProx adds the gradient μ (w - w_global) of its proximal term to the loss's gradient (Li et al., "Federated
    Optimization in Heterogeneous Networks", MLSys 2020, Algorithm 2). SCAFFOLD adds its corrections (`scaffold`).

    Args:
        local: the settings of the optimizer, its rate, the proximal term, the clipping.
        parameters: the trained parameters of the model.
        is_written_out: SGD in the operations of torch.optim.SGD, and hence with its bits, without its overhead.
    """

    def __init__(self, local: Local, parameters: Sequence[torch.nn.Parameter], *, is_written_out: bool = False) -> None:
        self._local, self.parameters = local, list(parameters)
        self._plain = [p.detach() for p in parameters]
        self.optimizer: torch.optim.Optimizer | None = None
        if not (local.has_custom_optimizer or (is_written_out and local.optimizer == "sgd")):
            self.optimizer = make_optimizer(local, self.parameters)
        self._momenta: dict[int, torch.Tensor] = {}
        self._start: list[torch.Tensor] = []
        self._corrections: list[torch.Tensor | None] = []

    def begin(self, corrections: Sequence[torch.Tensor | None] = ()) -> None:
        """Begin a client: clear the optimizer's state, and take the present parameters as the start.

        Args:
            corrections: SCAFFOLD's c - c_i of each parameter, None for a parameter without one; empty: no SCAFFOLD.
        """
        self._momenta.clear()
        if self._local.has_custom_optimizer:  # its state may be anywhere, and begin with the parameters
            self.optimizer = make_optimizer(self._local, self.parameters)
        elif self.optimizer is not None:
            self.optimizer.state.clear()
        if self._local.prox_mu:
            self._start = [p.clone() for p in self._plain]
        self._corrections = list(corrections)
        self._clear()

    @torch.no_grad()
    def __call__(self, change: Callable[[], None] | None = None) -> None:
        """Make one step with the parameters' gradients, and clear them.

        Args:
            change: changes the gradients, before they are clipped.
        """
        for parameter, start in zip(self.parameters, self._start, strict=False):
            if parameter.grad is not None:
                parameter.grad.add_(parameter - start, alpha=self._local.prox_mu)
        for parameter, correction in zip(self.parameters, self._corrections, strict=False):
            if correction is not None:
                if parameter.grad is None:  # unused by this loss: its gradient is zero
                    parameter.grad = torch.zeros_like(parameter)
                parameter.grad.add_(correction)
        if change is not None:
            change()
        if self._local.clip_norm is not None:
            torch.nn.utils.clip_grad_norm_(self.parameters, self._local.clip_norm)
        if self.optimizer is not None:
            self.optimizer.step()
        else:
            self._descend()
        self._clear()

    def _clear(self) -> None:
        for parameter in self.parameters:
            parameter.grad = None

    def _descend(self) -> None:
        found = [(index, p.grad) for index, p in enumerate(self.parameters) if p.grad is not None]
        if not found:
            return
        gradients = [gradient for _, gradient in found]
        weights = self._plain if len(found) == len(self._plain) else [self._plain[index] for index, _ in found]
        if self._local.weight_decay:
            gradients = self._with_decay(gradients, weights)
        if self._local.momentum:
            gradients = [self._momentum(found[at][0], gradient) for at, gradient in enumerate(gradients)]
        torch._foreach_add_(weights, gradients, alpha=-self._local.lr)

    def _with_decay(self, gradients: list[torch.Tensor], weights: list[torch.Tensor]) -> list[torch.Tensor]:
        decay = self._local.weight_decay
        if self._local.decay_vectors:
            return list(torch._foreach_add(gradients, weights, alpha=decay))
        return [g if w.ndim <= 1 else g.add(w, alpha=decay) for g, w in zip(gradients, weights, strict=True)]

    def _momentum(self, index: int, gradient: torch.Tensor) -> torch.Tensor:
        if index not in self._momenta:
            self._momenta[index] = gradient.clone()
        else:
            self._momenta[index].mul_(self._local.momentum).add_(gradient)
        return self._momenta[index]


class Step:
    """The steps of successive clients in one model, and the metrics that they measure.

    Args:
        task: the task of loss, metrics and units.
        model: the model, in training mode on its device.
        client: the client's side of the task's algorithm, if it has one.
        private: the gradients of private steps, in place of the batches'. Such a step measures nothing: loss, metrics
            and units of its rows would leave without noise.
    """

    def __init__(
        self,
        task: Task,
        model: torch.nn.Module,
        client: TrainingClient | None = None,
        private: NoisedGradients | None = None,
    ) -> None:
        self._task, self._model, self._client, self._private = task, model, client, private
        self._units, self._check, self._form = units_of(task), check_of(task), SameForm(model)
        self._has_loss = "loss" not in task.metrics

    def begin(self, descent: Descent, corrections: Sequence[torch.Tensor | None] = ()) -> None:
        """Begin a client, whose optimizer is `descent`; see `Descent.begin`."""
        descent.begin(corrections)
        self._descent = descent
        self._measured: Statistics = {}
        self._losses: list[tuple[torch.Tensor, float, float]] = []
        self.units: list[float] = []
        """The units of each step, if the task defines them."""

    def __call__(self, batch: Any, num_examples: int) -> None:
        """Take a step, after measuring the model."""
        inputs, targets = batch
        if self._private is not None:
            self._private.set(inputs, targets, num_examples)
            self._descent()
            return
        outputs = self._model(inputs)
        self._check.see(outputs, targets)
        self._form.see()
        if self._task.metrics:  # before the loss, which may change the outputs in place
            self._measured = add(self._measured, measured(self._task, outputs, targets))
        loss = one_loss(self._task.loss(outputs, targets), is_trained=True)
        objective = loss
        if self._client is not None:
            objective = one_loss(self._client.loss(loss, outputs, batch), is_trained=True)
        objective.backward()  # type: ignore[no-untyped-call]
        if self._client is None:
            self._descent()
        else:
            self._descent(self._client.change_gradients)
            with torch.no_grad():
                self._client.stepped()
        if self._units.is_said:
            self.units.append(self._units(targets))
        if self._has_loss:
            self._losses.append((loss.detach(), *self._units.factors(targets, num_examples)))

    def wait(self) -> None:
        """Wait until the device has done the last step."""
        if self._losses:
            self._losses[-1][0].item()

    def statistics(self) -> Statistics:
        """Return the sums of the metrics and, unless a metric has its name, of the loss, in the order of the steps."""
        if not self._has_loss or self._private is not None:
            return self._measured
        total, seen = 0.0, 0.0
        values = torch.stack([loss for loss, _, _ in self._losses]).flatten().tolist() if self._losses else []
        for value, (_, factor, count) in zip(values, self._losses, strict=True):
            if count:
                total, seen = total + value * factor, seen + count
        return dict(sorted((self._measured | {"loss": (total, seen)}).items()))


def measured(task: Task, outputs: Any, targets: Any) -> Statistics:
    """Return the sums of the task's metrics over a batch."""
    with torch.no_grad():
        return of_batch(task.metrics, map_tensors(torch.Tensor.detach, outputs), targets) if task.metrics else {}
