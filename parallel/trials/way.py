"""A way to run a task on a mesh, and the trial of the side effects of a pass of its model."""

from collections.abc import Iterator
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any

import torch
from torch import nn
from torch.nn.modules.batchnorm import _NormBase

from atoll.parallel.data.batch import map_tensors, tensors
from atoll.parallel.engine.blueprint import blocks
from atoll.parallel.engine.passes import REENTRANT
from atoll.parallel.engine.plan import Plan
from atoll.parallel.trials.watched import Uses, Written, borrowed_blocks, storage_of, written_in_forward
from atoll.task.randomness import seeded
from atoll.task.task import Task
from atoll.training.data.batches import fetcher
from atoll.training.model.compiled import in_place
from atoll.training.model.parameters import built_on_meta
from atoll.training.trials.trial import eager, undone

SMALL = 10_000_000
"""Number of parameters up to which a model is built with its values for trials."""


@dataclass(frozen=True, slots=True)
class Effects:
    """The side effects of a forward pass."""

    written: Written = field(default_factory=Written)
    """The tensors that it changes in place."""
    borrowed: list[str] = field(default_factory=list)
    """The blocks with a parameter that is used outside of their calls, in training or evaluation."""
    is_reentrant: bool = False
    """Whether the pass has checkpoints of torch's with `use_reentrant=True`."""
    moved: list[str] = field(default_factory=list)
    """The buffers that it changes in place, without the running statistics of norms."""


class MeshWay:
    """A way to run a task: by a plan, on rows of its training data.

    Args:
        task: the task with its options and settings.
        plan: the plan of the training.
        seed: the seed of the model.
        data: the training data, of which a few examples are read.
        model: a model that trials may change; with values if it is small, else on `meta`, if its code runs there.
    """

    def __init__(self, task: Task, plan: Plan, seed: int, data: Any, model: nn.Module) -> None:
        self.task, self.plan, self.seed, self.data, self.model = task, plan, seed, data, model
        self.is_small = is_small(model)

    @property
    def where(self) -> str:
        """The name of the mesh, for a sentence."""
        return f"{self.plan.mesh}" + (f" with zero={self.plan.zero_stage}" if self.plan.is_sharded else "")

    def new_model(self) -> nn.Module:
        """Build another model of the task, with the values of the seed."""
        return _new(self.task, self.seed)

    def rows(self, indices: torch.Tensor) -> Any:
        """Return inputs and targets of some examples."""
        return fetcher(self.data)(indices)

    @cached_property
    def two(self) -> Any:
        """Inputs and targets of two examples, on the device of the model."""
        device = next(self.model.parameters()).device
        return map_tensors(lambda tensor: tensor.to(device), self.rows(torch.arange(min(2, len(self.data)))))

    @cached_property
    def effects(self) -> Effects:
        """The side effects of passes in training and evaluation and of the loss; none if the first pass fails."""
        borrowed: list[str] = []
        found: list[Any] = []
        model, (inputs, targets) = self.model, self.two

        def run() -> Any:
            outputs = model(inputs)
            found.append(outputs)
            used = Uses({storage_of(parameter): name for name, parameter in model.named_parameters()})
            with suppress(Exception), used:  # any: the task's code, here perhaps with tensors that have no values
                self.task.loss(outputs, targets)
            return outputs, [model.get_parameter(name) for name in used.borrowed]

        def watched() -> None:
            borrowed.extend(borrowed_blocks(model, blocks(model), run))

        try:
            model.train()
            written = written_in_forward(model, watched)
        except Exception:
            return Effects()
        is_reentrant = any(_has_reentrant(tensor.grad_fn) for tensor in tensors(found))
        with suppress(Exception), torch.no_grad():  # the first evaluation reports it
            model.eval()
            watched()
        norms = [f"{name}." for name, module in model.named_modules() if isinstance(module, _NormBase)]
        moved = [name for name in written.buffers if not name.startswith(tuple(norms))]
        return Effects(written, list(dict.fromkeys(borrowed)), is_reentrant, moved)


@contextmanager
def way_of(task: Task, plan: Plan, seed: int, data: Any) -> Iterator[MeshWay]:
    """Provide a way to run a task, whose state is restored at the end; a small model is built with its values."""
    with undone(model=task.model, loss=task.loss), seeded(seed), ExitStack() as stack:
        model = stack.enter_context(built_on_meta(task))
        if is_small(model):
            stack.close()  # what its code keeps beside a model without values
            model = _new(task, seed)
        with eager():
            yield MeshWay(task, plan, seed, data, model)


def side_effects(way: MeshWay) -> Iterator[str]:
    """Yield the refusal of a pass whose side effects a plan would lose, repeat or not support."""
    plan, effects = way.plan, way.effects
    if effects.is_reentrant and plan.is_ddp:
        yield REENTRANT
    elif effects.written.parameters and (plan.is_sharded or plan.mesh.pp > 1):
        yield (
            f"{', '.join(effects.written.parameters)}: forward changes them in place, which {way.where} would lose or "
            "repeat; use a parametrization (torch.nn.utils.parametrize), or train on one process or with dp_replicate"
        )


def is_small(model: nn.Module) -> bool:
    """Return whether trials may build a model with its values."""
    return sum(parameter.numel() for parameter in model.parameters()) < SMALL


def _new(task: Task, seed: int) -> nn.Module:
    with seeded(seed):
        return in_place(task.model())


def _has_reentrant(node: Any) -> bool:
    """Return whether a graph of gradients has a checkpoint that runs another backward pass."""
    waiting, seen = [node], {None}
    while waiting:
        if (node := waiting.pop()) in seen:
            continue
        seen.add(node)
        if node.name() == "CheckpointFunctionBackward":
            return True
        waiting.extend(following for following, _ in node.next_functions)
    return False
