"""The hooks of a custom algorithm (`task.algorithm`) on a mesh, with tensors of which a rank has its boxes.

Where the mesh divides a tensor, a hook gets a DTensor. Arithmetic moves each element by itself, sums and norms are over
the whole tensor, and a plain tensor that a hook makes counts as the same on all ranks. So a hook that is written for
whole tensors gives the numbers of one process; `trials.hooks` finds those that do not.
"""

import copy
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from typing import Any, NoReturn

import torch
from torch import nn
from torch.distributed.tensor import DTensor, Replicate
from torch.distributed.tensor.experimental import implicit_replication
from torch.utils._python_dispatch import TorchDispatchMode

from atoll.parallel.engine.sharding import whole
from atoll.task.context import Context
from atoll.task.errors import TaskBroken
from atoll.task.local import Local
from atoll.task.randomness import states_of_generators
from atoll.task.task import Task
from atoll.tensors.layout import SHARED
from atoll.training.local.client import Tensors, TrainingClient, check_set, form_of, form_of_state


class WholeNumbers(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """The numbers that a hook takes out of a tensor (`item`, `float`, `if`): of the whole tensor, not of a summand."""

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        """Call a torch operation; `item` of a DTensor returns the number of the whole tensor."""
        if func is torch.ops.aten._local_scalar_dense.default:
            args = (whole(args[0]),)
        return func(*args, **(kwargs or {}))


@contextmanager
def hooked() -> Iterator[None]:
    """Replicate plain tensors that meet DTensors in the block, and take numbers (`item`) of whole tensors.

    Raises:
        TaskBroken: a hook has drawn from the process's generators.
    """
    before = states_of_generators()
    with implicit_replication(), WholeNumbers():  # type: ignore[no-untyped-call]
        yield
    if states_of_generators() != before:
        raise TaskBroken(
            "task.algorithm: a hook draws random numbers, and each rank of a mesh draws different ones; give the "
            "hook a seeded generator, or train in one process"
        )


def stand_in(outline: nn.Module, tensors: Mapping[str, torch.Tensor]) -> nn.Module:
    """Return a meta-device copy of a model, bound to the given tensors.

    Args:
        outline: the outline of the whole model.
        tensors: the tensors, by the names of `forms_of`.
    """
    memo: dict[int, Any] = {}
    for name, parameter in outline.named_parameters():
        if name in tensors:
            given = tensors[name]
            is_parameter = isinstance(given, nn.Parameter)
            memo[id(parameter)] = given if is_parameter else nn.Parameter(given, requires_grad=False)
    memo |= {id(buffer): tensors[name] for name, buffer in outline.named_buffers() if name in tensors}
    return copy.deepcopy(outline, memo)


class MeshClient(TrainingClient):
    """The client of one training on a mesh; every rank calls its methods at the same point.

    Args:
        task: the task, with the algorithm.
        outline: the model without memory.
        read: returns what this rank has of each tensor now, trained parameters as the optimizer moves them; by the
            names of `forms_of`.
        local: the settings of the round.
        context: the context of the training.
        shared: the shared tensors as they were received, by name.
        state: the client's state; None: the algorithm's first one.

    Raises:
        TaskMismatch, TaskBroken: as `TrainingClient`.
    """

    def __init__(
        self,
        task: Task,
        outline: nn.Module,
        read: Callable[[], Mapping[str, torch.Tensor]],
        local: Local,
        context: Context,
        *,
        shared: Tensors,
        state: Tensors | None,
    ) -> None:
        self._read, self._here = read, dict(read())
        model = stand_in(outline, self._here)
        self._buffers = _places_of_buffers(model, self._here)
        with hooked():
            super().__init__(task, model, local, context, shared=shared, state=state, data=self._no_batches)
        self.state = {name: settled(tensor) for name, tensor in self.state.items()}
        self._first = dict(self.state)
        self._made = {**vars(self), "_made": None}

    @property
    def inputs(self) -> Any:
        """Refuse the access: each rank has only some rows of the batch."""
        self._refuse("inputs")

    @property
    def targets(self) -> Any:
        """Refuse the access: each rank has only some rows of the batch."""
        self._refuse("targets")

    def outputs(self, tensors: Mapping[str, torch.Tensor], inputs: Any = None) -> Any:
        """Refuse the call: each rank has only some rows of a batch."""
        self._refuse("outputs")

    def gradient(self, tensors: Mapping[str, torch.Tensor]) -> Tensors:
        """Refuse the call: each rank has only some rows of a batch."""
        self._refuse("gradient")

    def full_gradient(self, tensors: Mapping[str, torch.Tensor]) -> Tensors:
        """Refuse the call: each rank has only some rows of a batch."""
        self._refuse("full_gradient")

    def full_loss(self, tensors: Mapping[str, torch.Tensor]) -> float:
        """Refuse the call: each rank has only some rows of a batch."""
        self._refuse("full_loss")

    def _refuse(self, what: str) -> NoReturn:
        raise TaskBroken(
            f"task.algorithm: {type(self.algorithm).__name__} uses client.{what}, and a rank of a mesh has rows of a "
            "batch and boxes of the model; leave it out, or train in one process"
        )

    def _no_batches(self) -> NoReturn:
        self._refuse("full_loss")

    def begin(self) -> None:
        """Call the algorithm's hook `begin`."""
        with self._hooked():
            super().begin()

    def change_gradients(self) -> None:
        """Replace the parameters' gradients by those that the algorithm's hook `gradients` returns."""
        with self._hooked(), torch.no_grad():
            super().change_gradients()

    def stepped(self) -> None:
        """Count a step, and call the algorithm's `after_step`."""
        with self._hooked(), torch.no_grad():
            super().stepped()

    def end(self) -> None:
        """Call the algorithm's hook `end`."""
        with self._hooked():
            super().end()

    def load_evaluated(self) -> None:
        """Load the tensors into the model that the site evaluates; errors as in one process."""
        with self._hooked():
            super().load_evaluated()

    def to_send(self) -> Tensors:
        """Return the shared tensors after the training, each divided as it was received.

        Raises:
            TaskBroken: the algorithm has set tensors of other names or shapes.
        """
        check_set("client.shared", form_of(self.shared, SHARED), form_of(self.received, SHARED))
        return {name: placed(self.shared[name], like) for name, like in self.received.items()}

    def to_keep(self) -> Tensors:
        """Return the client's state after the training, each tensor divided as it was; errors as in `to_send`."""
        check_set("client.state", form_of_state(self.state), self._form)
        return {name: placed(self.state[name], like) for name, like in self._first.items()}

    @property
    def held(self) -> dict[str, Any]:
        """The attributes that change in a training: state and shared tensors, and what hooks have set or replaced."""
        is_held = {"state", "shared", "leaves_out", "num_steps"}.__contains__
        return {
            name: value
            for name, value in vars(self).items()
            if is_held(name) or name not in self._made or not (name.startswith("_") or value is self._made[name])
        }

    def hold(self, values: Mapping[str, Any]) -> None:
        """Restore the attributes (`held`) of an earlier attempt, after `begin` at the same version."""
        for name in self.held.keys() - values.keys():
            delattr(self, name)
        vars(self).update(values)

    @contextmanager
    def _hooked(self) -> Iterator[None]:
        """Run a hook in the block with the model's present tensors: its code may have replaced a buffer."""
        if self._buffers:
            self._here = dict(self._read())
            for module, key, name in self._buffers:
                module._buffers[key] = self._here[name]
        with hooked():
            yield

    def _tensors(self) -> Tensors:
        return {name: tensor.detach() for name, tensor in self._here.items()}

    def _trained(self) -> dict[str, nn.Parameter]:
        return {name: t for name, t in self._here.items() if isinstance(t, nn.Parameter) and t.requires_grad}

    def _placed(self, value: torch.Tensor, like: torch.Tensor) -> torch.Tensor:
        return placed(value, like)


def _places_of_buffers(model: nn.Module, tensors: Mapping[str, torch.Tensor]) -> list[tuple[nn.Module, str, str]]:
    """Return the places of buffers: module, its name of the buffer, and the tensor's name."""
    names = {id(tensor): name for name, tensor in tensors.items()}
    places = [(module, key, id(buffer)) for module in model.modules() for key, buffer in module._buffers.items()]
    return [(module, key, names[of_buffer]) for module, key, of_buffer in places if of_buffer in names]


def placed(value: torch.Tensor, like: torch.Tensor) -> torch.Tensor:
    """Return a tensor divided over the ranks as another of its shape is; every rank calls it."""
    value = value.detach()
    if not isinstance(like, DTensor):
        return whole(value)
    mesh = like.device_mesh
    if not isinstance(value, DTensor) or value.device_mesh != mesh:
        value = DTensor.from_local(whole(value), mesh, [Replicate()] * mesh.ndim, run_check=False)
    return value.redistribute(placements=like.placements)


def settled(tensor: torch.Tensor) -> torch.Tensor:
    """Return a tensor without pending sums over the ranks; every rank calls it."""
    if not isinstance(tensor, DTensor):
        return tensor
    placements = [Replicate() if placement.is_partial() else placement for placement in tensor.placements]
    return tensor.redistribute(placements=placements)
