"""The client of one training, for the hooks of a custom algorithm (`task.algorithm`)."""

from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from typing import Any

import numpy as np
import torch
from torch.func import functional_call

from atoll.task.algorithm import Algorithm
from atoll.task.arrays import ALLOWED, Arrays, check_finite, check_form
from atoll.task.context import Context
from atoll.task.errors import TaskBroken
from atoll.task.local import Local
from atoll.task.task import Task
from atoll.tensors.layout import SHARED, STATE, Layout, Tensor, in_order
from atoll.training.data.batches import batch_sizes, to_device
from atoll.training.data.draws import Fetch
from atoll.training.data.units import units_of
from atoll.training.model.parameters import state_of, trained_by_name, travelling_dtype
from atoll.training.trials.contract import one_loss

Tensors = dict[str, torch.Tensor]

EXAMPLES_AT_ONCE = 256
"""Examples of one batch of `full_gradient`, unless the task's local batches are smaller."""


class TrainingClient:
    """The client of one training, as the hooks see it; see `algorithm.Client` for the interface.

    Args:
        task: the task, with the algorithm.
        model: the model that is trained, with the version's tensors and the layers that stay at the site.
        local: the settings of the round.
        context: the context of the training.
        shared: the received shared tensors, by name.
        state: the client's state; None: the algorithm's first state.
        data: returns a function that fetches examples of the training data, and their number.

    Raises:
        TaskMismatch: the version has other shared tensors than the algorithm.
        TaskBroken: the algorithm's tensors cannot be sent or stored.
    """

    def __init__(
        self,
        task: Task,
        model: torch.nn.Module,
        local: Local,
        context: Context,
        *,
        shared: Tensors,
        state: Tensors | None,
        data: Callable[[], tuple[Fetch, int]],
    ) -> None:
        assert task.algorithm is not None
        self._task, self._data = task, data
        self.algorithm: Algorithm = task.algorithm
        self.model, self.local, self.context = model, local, context
        self.trained = self._trained()
        self.start = {name: tensor.detach().clone() for name, tensor in self._tensors().items()}
        check_form(form_of(shared, SHARED), form_of_shared(self.algorithm.shared(model)))
        self.received, self.shared = shared, {name: tensor.clone() for name, tensor in shared.items()}
        self._is_first = state is None
        first = dict(self.algorithm.state(model)) if state is None else state
        self.state = {name: tensor.detach().clone() for name, tensor in first.items()}
        self._form = form_of_state(self.state)
        self.leaves_out: set[str] = set()
        self._batch: tuple[Any, Any] = None, None
        self.num_steps = 0

    @property
    def inputs(self) -> Any:
        """The inputs of the present batch."""
        return self._batch[0]

    @property
    def targets(self) -> Any:
        """The targets of the present batch."""
        return self._batch[1]

    @property
    def parameters(self) -> Tensors:
        """The present values of the trained parameters."""
        return {name: parameter.detach() for name, parameter in self.trained.items()}

    def outputs(self, tensors: Mapping[str, torch.Tensor], inputs: Any = None) -> Any:
        """Return the outputs of the model with other tensors; see `algorithm.Client`."""
        with torch.no_grad(), evaluating(self.model):
            return functional_call(self.model, self._filled(tensors), (self.inputs if inputs is None else inputs,))

    def gradient(self, tensors: Mapping[str, torch.Tensor]) -> Tensors:
        """Return the gradient on the present batch at other parameters; see `algorithm.Client`."""
        return self._gradient(tensors, self.inputs, self.targets, keeps=False)

    def full_gradient(self, tensors: Mapping[str, torch.Tensor]) -> Tensors:
        """Return the gradient over all of the training data; see `algorithm.Client`."""
        sums = {name: torch.zeros_like(parameter) for name, parameter in self.parameters.items()}
        total, units = 0.0, units_of(self._task)
        for inputs, targets, rows in self._batches():
            factor, counted = units.factors(targets, rows)
            for name, gradient in self._gradient(dict(tensors), inputs, targets, keeps=True).items():
                sums[name].add_(gradient, alpha=factor if counted else 0.0)
            total += counted
        divisor = 1.0 if units.is_sum else total or 1.0
        return {name: gradient / divisor for name, gradient in sums.items()}

    def full_loss(self, tensors: Mapping[str, torch.Tensor]) -> float:
        """Return the loss over all of the training data; see `algorithm.Client`."""
        units, total, seen = units_of(self._task), 0.0, 0.0
        for inputs, targets, rows in self._batches():
            loss = one_loss(self._task.loss(self.outputs(tensors, inputs), targets))
            of_batch, counted = units.sums(loss.item(), targets, rows)
            total, seen = total + of_batch, seen + counted
        return total / seen if seen else 0.0

    def _batches(self) -> Iterator[tuple[Any, Any, int]]:
        """Yield all of the training data, in order: inputs, targets, number of examples."""
        fetch, count = self._data()
        device = next(self.model.parameters()).device
        at_once = min(self.local.batch_size or count, EXAMPLES_AT_ONCE)
        for rows in torch.split(torch.arange(count), batch_sizes(count, at_once, model=self.model)):
            yield (*to_device(fetch(0, rows), device), len(rows))

    def _gradient(self, tensors: Mapping[str, torch.Tensor], inputs: Any, targets: Any, *, keeps: bool) -> Tensors:
        filled = self._filled(tensors, keeps=keeps)
        leaves = {name: filled[name].detach().requires_grad_() for name in self.trained}
        with torch.enable_grad():
            outputs = functional_call(self.model, filled | leaves, (inputs,))
            loss = one_loss(self._task.loss(outputs, targets), is_trained=True)
            found = torch.autograd.grad(loss, list(leaves.values()), allow_unused=True)
        return {
            name: torch.zeros_like(leaf) if gradient is None else gradient
            for (name, leaf), gradient in zip(leaves.items(), found, strict=True)
        }

    def _filled(self, tensors: Mapping[str, torch.Tensor], *, keeps: bool = True) -> Tensors:
        """Return all tensors for a forward pass that changes no tensor of the model or of the start.

        Args:
            tensors: the tensors, by name, in place of the model's.
            keeps: the pass changes none of the given tensors either; otherwise it may change their buffers in place.
        """
        if unknown := sorted(tensors.keys() - self.start.keys()):
            raise TaskBroken(f"{', '.join(unknown)}: no tensor of the model (its tensors: {', '.join(self.start)})")
        now = {name: tensor.detach() for name, tensor in self._tensors().items() if name not in tensors}
        lent = {name: t for name, t in tensors.items() if not keeps and t is not self.start[name]}
        every = {name: t.detach() for name, t in (now | dict(tensors)).items()}
        return {name: t if name in self.trained or name in lent else t.clone() for name, t in every.items()}

    # ------------------------------------------------------------ the loop

    def begin(self) -> None:
        """Call the algorithm's hook `begin`."""
        self.algorithm.begin(self)

    def end(self) -> None:
        """Call the algorithm's hook `end`."""
        self.algorithm.end(self)

    def loss(self, loss: torch.Tensor, outputs: Any, batch: Any) -> torch.Tensor:
        """Return the algorithm's loss of the next batch."""
        self._batch = batch
        return self.algorithm.loss(self, loss, outputs)

    def change_gradients(self) -> None:
        """Replace the parameters' gradients by those that the algorithm's hook `gradients` returns."""
        given = {name: torch.zeros_like(p) if p.grad is None else p.grad.detach() for name, p in self.trained.items()}
        changed = self.algorithm.gradients(self, given)
        for name, parameter in self.trained.items():
            if name not in changed or changed[name].shape != parameter.shape:
                found = "missing" if name not in changed else tuple(changed[name].shape)
                raise TaskBroken(f"algorithm.gradients: {name} is {found}, expected {tuple(parameter.shape)}")
            parameter.grad = self._placed(changed[name].detach(), parameter).to(parameter.dtype)

    def stepped(self) -> None:
        """Count a step, and call the algorithm's `after_step`."""
        self.num_steps += 1
        self.algorithm.after_step(self)

    def check_state(self) -> None:
        """Check that the client has the state of its last accepted training, if the algorithm needs it.

        Raises:
            TaskBroken: the state is lost.
        """
        if self._is_first and self.algorithm.needs_state and self.state:
            raise TaskBroken(
                "the client's state of its last training that counted is no longer in this agent's state directory "
                "(personal/), and the algorithm needs it: put it back, or start a new run"
            )

    def load_evaluated(self) -> None:
        """Load the tensors into the model that the site evaluates.

        Raises:
            TaskBroken: the model has no such tensor, or its shape differs.
        """
        changed, state = self.algorithm.evaluated(self), self._tensors()
        for name, tensor in changed.items():
            if name not in state or state[name].shape != tensor.shape:
                expected = tuple(state[name].shape) if name in state else "no such tensor"
                raise TaskBroken(f"algorithm.evaluated: {name} is {tuple(tensor.shape)}, the model has {expected}")
            with torch.no_grad():
                state[name].copy_(self._placed(tensor, state[name]))

    def _tensors(self) -> Tensors:
        """Return the present values of the model's tensors that are exchanged."""
        return state_of(self.model)

    def _trained(self) -> dict[str, torch.nn.Parameter]:
        """Return the parameters of the model that an optimizer moves."""
        return trained_by_name(self.model)

    def _placed(self, value: torch.Tensor, like: torch.Tensor) -> torch.Tensor:
        """Return a hook's tensor on the device and in the dtype of `like`."""
        return value

    def sent(self) -> Arrays:
        """Return the changes of the shared tensors, in their form on the wire.

        Raises:
            TaskBroken: the algorithm has set tensors of other names or shapes.
            NotFinite: a value is not finite.
        """
        check_set("client.shared", form_of(self.shared, SHARED), form_of_shared(self.received))
        before, after = _arrays(self.received, SHARED), _arrays(self.shared, SHARED)
        changes = {name: np.subtract(after[name], before[name]) for name in after}
        check_finite(changes, "update")
        return changes

    def kept(self) -> Arrays:
        """Return the client's state in its stored form; errors as in `sent`."""
        check_set("client.state", form_of_state(self.state), self._form)
        state = _arrays(self.state, STATE)
        check_finite(state, "client's state")
        return state


def form_of_shared(tensors: Mapping[str, torch.Tensor]) -> Layout:
    """Return the layout of an algorithm's shared tensors in a version.

    Raises:
        TaskBroken: some are no float tensors.
    """
    faults = [name for name, tensor in tensors.items() if not _is_float(tensor)]
    if faults:
        raise TaskBroken(
            f"algorithm.shared: {', '.join(faults)} must be tensors of floats: the server takes their mean"
        )
    return in_order(Tensor(SHARED + name, "F32", tuple(tensor.shape)) for name, tensor in tensors.items())


def form_of_state(tensors: Mapping[str, torch.Tensor]) -> Layout:
    """Return the layout of a client's state in its file.

    Raises:
        TaskBroken: some are no tensors of a type that can be stored.
    """
    faults = [name for name, tensor in tensors.items() if not isinstance(tensor, torch.Tensor) or tensor.is_complex()]
    if faults:
        raise TaskBroken(f"algorithm.state: {', '.join(faults)}: must be tensors of floats or of whole numbers")
    return form_of(tensors, STATE)


def form_of(tensors: Mapping[str, torch.Tensor], prefix: str) -> Layout:
    """Return the layout of tensors, under names with a prefix."""
    dtypes = {name: travelling_dtype(tensor) for name, tensor in tensors.items()}
    return in_order(
        Tensor(prefix + name, ALLOWED.get(dtypes[name], str(dtypes[name])), tuple(tensor.shape))
        for name, tensor in tensors.items()
    )


def first_shared(task: Task, model: torch.nn.Module) -> Arrays:
    """Return the shared tensors of version 0; empty without a custom algorithm.

    Raises:
        TaskBroken: some cannot be exchanged.
    """
    tensors = dict(task.algorithm.shared(model)) if task.algorithm is not None else {}
    form_of_shared(tensors)
    return _arrays(tensors, SHARED)


def tensors_with(prefix: str, arrays: Mapping[str, np.ndarray[Any, Any]], device: torch.device | str) -> Tensors:
    """Return the tensors whose names have a prefix, without it."""
    return {
        name.removeprefix(prefix): torch.from_numpy(array.copy()).to(device)
        for name, array in arrays.items()
        if name.startswith(prefix)
    }


def check_set(what: str, found: Layout, form: Layout) -> None:
    """Check the names, shapes and dtypes of the tensors that an algorithm has set.

    Raises:
        TaskBroken: they differ; the message lists every difference.
    """
    try:
        check_form(found, form)
    except ValueError as error:
        raise TaskBroken(f"algorithm: {what}: {error}") from error


def _is_float(tensor: object) -> bool:
    return isinstance(tensor, torch.Tensor) and tensor.is_floating_point()


def _arrays(tensors: Mapping[str, torch.Tensor], prefix: str) -> Arrays:
    return {
        prefix + name: tensor.detach().to("cpu", copy=True).numpy().astype(travelling_dtype(tensor), copy=False)
        if tensor.dtype != torch.bfloat16
        else tensor.detach().float().cpu().numpy()
        for name, tensor in tensors.items()
    }


@contextmanager
def evaluating(model: torch.nn.Module) -> Iterator[None]:
    """Set all modules to evaluation mode, and restore the mode of each."""
    modes = [(module, module.training) for module in model.modules()]
    model.eval()
    try:
        yield
    finally:
        for module, mode in modes:
            module.training = mode
