"""The training and the evaluation of one client's model, in one process."""

from collections import deque
from dataclasses import dataclass
from typing import Any

import torch

from atoll.aggregation.printable import count_of
from atoll.parallel.local_training.batches import to_device
from atoll.parallel.local_training.client import TrainingClient
from atoll.parallel.local_training.draws import Fetch, drawing, held_by, seed_held
from atoll.parallel.local_training.fednova import Normalizer
from atoll.parallel.local_training.kept_optimizer import KeptOptimizer
from atoll.parallel.local_training.local_order import draw_order
from atoll.parallel.local_training.lone_row import lone_row_refused
from atoll.parallel.local_training.one_loss import one_loss
from atoll.parallel.local_training.own_optimizer import own_optimizer
from atoll.parallel.local_training.parameters import initial_parameters, load_parameters, trained_by_name, update_of
from atoll.parallel.local_training.same_form import SameForm
from atoll.parallel.local_training.scaffold import ControlVariates
from atoll.parallel.local_training.trees import map_tensors
from atoll.parallel.local_training.unit_check import check_of
from atoll.parallel.local_training.units import units_of
from atoll.parallel.optimizers.make import decay_groups
from atoll.parallel.task.array_task import is_work
from atoll.parallel.task.deadline import Deadline
from atoll.parallel.task.errors import OutOfTime, TaskBroken
from atoll.parallel.task.local import Local
from atoll.parallel.task.metrics import Statistics, add, as_statistics, of_batch
from atoll.parallel.task.randomness import seed_everything, seeded
from atoll.parallel.task.task import Task

__all__ = [
    "Work",
    "evaluate",
    "initial_parameters",
    "load_parameters",
    "make_optimizer",
    "seed_everything",
    "train_locally",
    "update_of",
]

RECENT_STEPS = 5
"""Number of last steps, the longest of which is the expected duration of the next step."""

COUNTED_AT_ONCE = 256
"""Examples of which the units are counted together."""

EVALUATED_AT_ONCE = 256
"""Examples of one forward pass of an evaluation."""


@dataclass(frozen=True, slots=True)
class Work:
    """The work of one local training."""

    num_examples: int | float
    """The weight in FedAvg, n_k > 0: the size of the data set, or its units if the task says them (`Units.weight`);
    not the number of examples seen."""

    work: float
    """Steps done / steps requested, in (0, 1]."""

    statistics: Statistics
    """The statistics of the loss and the task's metrics over the batches seen, before each step; empty with `fit`."""

    steps: int
    """The number of optimizer steps done; 0 with `fit`, whose steps are not counted."""

    normalizer: Normalizer | None = None
    """The normalizer of FedNova over the steps; None with `fit`."""


def train_locally(
    task: Task,
    model: torch.nn.Module,
    dataset: Any,
    local: Local,
    *,
    seed: int,
    deadline: Deadline | None = None,
    device: torch.device | str = "cpu",
    algorithm: ControlVariates | TrainingClient | KeptOptimizer | None = None,
) -> Work:
    """Train the model in place: E epochs of mini-batches, or as many steps as fit before the deadline.

    The state of Python's, numpy's and torch's random generators is set from the seed and left where the training ends:
    this process belongs to the training. The same seed, data and number of threads give the same bits. Random numbers
    that the data set draws follow from (seed, epoch, index) alone (`draws`), except with `fit`. Each epoch has its own
    order; the last short batch is kept (`batches.batch_sizes` has the one exception, for BatchNorm).
    `algorithm` is the client's part in the built-in loop: SCAFFOLD's control variates, the hooks of the task's own
    algorithm, or the optimizer's state that stays at the client.

    Raises:
        TaskBroken: the data set is empty, or `fit` returns no work in (0, 1].
        OutOfTime: the deadline came before the first step.

    Source:
        McMahan et al., "Communication-Efficient Learning of Deep Networks from Decentralized Data", AISTATS 2017,
        Algorithm 1, ClientUpdate. The deadline is ours.
    """
    deadline = deadline or Deadline.never()
    num_examples = len(dataset)
    if num_examples < 1:
        raise TaskBroken("the data set is empty; a site needs at least one example to train")
    seed_everything(seed)
    model.to(device).train()
    if task.fit is not None:
        form = SameForm(model)
        seed_held(held_by(dataset), f"{seed}")
        done = _fit(task.fit, model, dataset, local, deadline)
        if fault := form.left_by_fit():
            raise TaskBroken(fault)
        return Work(_weight(task, dataset), done, {}, 0)

    fetch, normalizer = drawing(dataset, seed), Normalizer(local)
    step = Step(task, model, local, algorithm)
    statistics: Statistics = {}
    if isinstance(algorithm, TrainingClient):
        algorithm.begin()
    units = list[float]()
    recent: deque[float] = deque([0.0], maxlen=RECENT_STEPS)
    done, order = 0, draw_order(num_examples, local, model)
    for number, indices in order.batches():
        if deadline.passed() or max(recent) > deadline.remaining():
            break
        began = deadline.now()
        with lone_row_refused():
            of_step, counted = step(to_device(fetch(number, indices), device), len(indices))
        statistics = add(statistics, of_step)
        units.append(counted)
        recent.append(deadline.now() - began)
        normalizer.step()
        done += 1
    if done == 0:
        raise OutOfTime(f"no time for the first of {count_of(order.steps, 'step')}")
    if isinstance(algorithm, TrainingClient):
        algorithm.end()
    weight = units_of(task).weight(units, order.sizes, num_examples)
    return Work(weight, done / order.steps, statistics, done, normalizer)


class Step:
    """A step of the local optimizer, whose state lasts for this training.

    FedProx adds the gradient μ (w - w_global) of its proximal term to that of the loss (Li et al., "Federated
    Optimization in Heterogeneous Networks", MLSys 2020, Algorithm 2). SCAFFOLD adds its corrections (`scaffold`).
    """

    def __init__(
        self,
        task: Task,
        model: torch.nn.Module,
        local: Local,
        algorithm: ControlVariates | TrainingClient | KeptOptimizer | None = None,
    ) -> None:
        self._task, self._model, self._local = task, model, local
        self._client = algorithm if isinstance(algorithm, TrainingClient) else None
        corrections = algorithm.corrections if isinstance(algorithm, ControlVariates) else {}
        self._units, self._check = units_of(task), check_of(task)
        self._form = SameForm(model)
        self._parameters = [p for p in model.parameters() if p.requires_grad]
        self._start = [p.detach().clone() for p in self._parameters] if local.prox_mu else []
        by_name = trained_by_name(model) if corrections else {}
        self._corrections = [
            (by_name[name], torch.tensor(array).to(by_name[name])) for name, array in corrections.items()
        ]
        self._optimizer = make_optimizer(local, self._parameters)
        if isinstance(algorithm, KeptOptimizer):
            algorithm.begin(self._optimizer, trained_by_name(model))

    def __call__(self, batch: Any, num_examples: int) -> tuple[Statistics, float]:
        """Take the step; return the statistics of the model before it, and the units if the task says them."""
        inputs, targets = batch
        self._optimizer.zero_grad(set_to_none=True)
        outputs = self._model(inputs)
        self._check.see(outputs, targets)
        self._form.see()
        measured = _measured(self._task, outputs, targets)  # before the loss, which may change the outputs in place
        loss = one_loss(self._task.loss(outputs, targets), is_trained=True)
        self._objective(loss, outputs, batch).backward()  # type: ignore[no-untyped-call]
        with torch.no_grad():
            for parameter, start in zip(self._parameters, self._start, strict=False):
                if parameter.grad is not None:
                    parameter.grad.add_(parameter - start, alpha=self._local.prox_mu)
            for parameter, correction in self._corrections:
                if parameter.grad is None:  # no part of this loss: its gradient is zero
                    parameter.grad = torch.zeros_like(parameter)
                parameter.grad.add_(correction)
            if self._client is not None:
                self._client.change_gradients()
            if self._local.clip_norm is not None:
                torch.nn.utils.clip_grad_norm_(self._parameters, self._local.clip_norm)
            self._optimizer.step()
            if self._client is not None:
                self._client.stepped()
            counted = self._units(targets) if self._units.is_said else 0
            return _with_loss(measured, self._task, loss, targets, num_examples), counted

    def _objective(self, loss: torch.Tensor, outputs: Any, batch: Any) -> torch.Tensor:
        """Return the loss whose gradient is taken."""
        if self._client is None:
            return loss
        return one_loss(self._client.loss(loss, outputs, batch), is_trained=True)


def make_optimizer(local: Local, parameters: list[torch.nn.Parameter]) -> torch.optim.Optimizer:
    """Return the optimizer that `local` names, with a fresh state.

    Raises:
        TaskBroken: a user's own does not make one.
    """
    if local.has_own_optimizer:
        return own_optimizer(local, parameters)
    groups = decay_groups(parameters, spares_vectors=not local.decay_vectors)
    if local.optimizer == "sgd":
        return torch.optim.SGD(groups, lr=local.lr, momentum=local.momentum, weight_decay=local.weight_decay)
    kind = torch.optim.Adam if local.optimizer == "adam" else torch.optim.AdamW
    return kind(groups, lr=local.lr, weight_decay=local.weight_decay)


def evaluate(
    task: Task,
    model: torch.nn.Module,
    dataset: Any,
    *,
    batch_size: int = EVALUATED_AT_ONCE,
    device: torch.device | str = "cpu",
    seed: int = 0,
) -> Statistics:
    """Return the statistics of the loss and the task's metrics over the whole data set, in eval mode.

    What the model draws depends on the seed alone, and what the data set draws is the same in every evaluation; the
    generators are left as they were.
    """
    evaluation = Evaluation(task, model.to(device).eval(), device=device)
    with seeded(seed):
        return evaluation(drawing(dataset, 0), len(dataset), batch_size=batch_size)


class Evaluation:
    """The evaluation of data sets in one model, which is in eval mode on its device.

    Args:
        task: the task of loss and metrics.
        model: the model.
        device: the device of the model.
    """

    def __init__(self, task: Task, model: torch.nn.Module, *, device: torch.device | str = "cpu") -> None:
        self._task, self._model, self._device, self._check = task, model, device, check_of(task)

    @torch.no_grad()
    def __call__(self, fetch: Fetch, num_examples: int, *, batch_size: int = EVALUATED_AT_ONCE) -> Statistics:
        """Return the statistics of a data set; what is drawn comes from the generators as they are.

        Args:
            fetch: of the data set, as `drawing` makes it.
            num_examples: of the data set.
            batch_size: examples of one forward pass.
        """
        task = self._task
        sums: Statistics | None = None
        for indices in torch.split(torch.arange(num_examples), batch_size):
            if len(indices):  # an empty tensor splits into one empty batch
                inputs, targets = to_device(fetch(0, indices), self._device)
                outputs = self._model(inputs)
                self._check.see(outputs, targets)
                measured = _measured(task, outputs, targets)
                loss = one_loss(task.loss(outputs, targets))
                sums = add(sums or {}, _with_loss(measured, task, loss, targets, len(indices)))
        if sums is None:
            return {} if "loss" in task.metrics else {"loss": (0.0, 0.0)}
        return sums


def _measured(task: Task, outputs: Any, targets: Any) -> Statistics:
    with torch.no_grad():
        return of_batch(task.metrics, map_tensors(torch.Tensor.detach, outputs), targets) if task.metrics else {}


def _with_loss(measured: Statistics, task: Task, loss: torch.Tensor, targets: Any, num_examples: int) -> Statistics:
    """Return the sums of the metrics and, unless a metric has its name, of the loss."""
    statistics = dict(measured)
    if "loss" not in statistics:
        statistics |= as_statistics({"loss": units_of(task).sums(loss.item(), targets, num_examples)})
    return statistics


def _weight(task: Task, dataset: Any) -> int | float:
    """Return the weight in FedAvg of a site whose training reports no units: they are counted here."""
    units, num_examples = units_of(task), len(dataset)
    if units.function is None:
        return num_examples
    fetch, parts = drawing(dataset, 0), torch.split(torch.arange(num_examples), COUNTED_AT_ONCE)
    return units.weight([units(fetch(0, part)[1]) for part in parts], list(map(len, parts)), num_examples)


def _fit(fit: Any, model: torch.nn.Module, dataset: Any, local: Local, deadline: Deadline) -> float:
    if deadline.passed():
        raise OutOfTime("the deadline passed before the training began")
    work = fit(model, dataset, local, deadline)
    if not is_work(work):
        raise TaskBroken(f"fit must return the work done, a number in (0, 1], got {work!r}")
    return float(work)
