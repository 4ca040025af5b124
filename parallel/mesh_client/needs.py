"""The boxes and the memory of each rank of a mesh, before any rank is started.

    held         bytes of the parameters and buffers that the rank holds
    own          bytes of the boxes that it sends, in float32: its part of the update, without a codec
    gradients    bytes of the boxes of trained parameters
    optimizer    moments x gradients, and 4 bytes for each of these boxes if there are two: the count of steps
    peak         held + gradients + optimizer

moments: 0 with sgd, 1 with its momentum, 2 with adam and adamw. Activations come on top, and what is gathered for a
while: `planner/memory` estimates both for known shapes. The engine assembles the boxes, one rank after another in
this process, with tensors that have no memory and torch's fake process group, which sends nothing.
"""

from collections.abc import Iterable, Iterator
from dataclasses import dataclass

import torch
import torch.distributed as dist
from torch import nn
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.distributed.tensor import DTensor

from atoll.parallel.engine.assemble import assemble
from atoll.parallel.engine.axes import Axes
from atoll.parallel.engine.blank import give_memory
from atoll.parallel.engine.optimization import Optimization
from atoll.parallel.engine.plan import Plan
from atoll.parallel.exchange.shares import owned, shares_of
from atoll.parallel.mesh_client.building import Outline, no_optimizer
from atoll.parallel.mesh_client.faults import outline_of
from atoll.task.local import Local
from atoll.task.task import Task
from atoll.training.local.local_layers import names_that_stay

STEP_BYTES = 4
"""The count of steps that adam and adamw keep for each parameter [bytes]."""


@dataclass(frozen=True, slots=True)
class RankNeeds:
    """The boxes of one rank, and its memory [bytes]."""

    rank: int
    boxes: int
    """The number of boxes that it holds."""
    own_boxes: int
    """The number of boxes that it sends."""
    held: int
    own: int
    gradients: int
    optimizer: int | None
    """The optimizer's state; None with a custom optimizer, whose state is not known."""

    @property
    def peak(self) -> int:
        """The predicted peak memory in training, without activations and without the state of an unknown optimizer."""
        return self.held + self.gradients + (self.optimizer or 0)


def moments_of(local: Local) -> int | None:
    """Return the numbers of state that the local optimizer keeps for each parameter; None: not known."""
    if local.has_custom_optimizer:
        return None
    return {"sgd": int(local.momentum > 0), "adam": 2, "adamw": 2}[local.optimizer_name]


def needs_of_ranks(task: Task, local: Local, plan: Plan) -> list[RankNeeds]:
    """Return the needs of each rank, in order. This process must have no process group.

    Args:
        task: the task of the model.
        local: the settings of a round.
        plan: a plan that `faults_of_mesh` does not refuse.

    Raises:
        ValueError: the engine refuses the model, or a tensor cannot be exchanged.
    """
    return [_needs(task, local, plan, rank) for rank in range(plan.mesh.size)]


def _needs(task: Task, local: Local, plan: Plan, rank: int) -> RankNeeds:
    dist.init_process_group("fake", rank=rank, world_size=plan.mesh.size)
    try:
        model, axes = outline_of(task), Axes(plan.mesh, "cpu")
        outline, stays = Outline.of(model), names_that_stay(model, local.keep)
        parts = _parts(model, plan, axes)
        with FakeTensorMode(allow_non_fake_inputs=True):
            give_memory(parts, "cpu")
        shares, held = shares_of(parts, axes, outline.tied), _bytes(_tensors(parts))
    finally:
        dist.destroy_process_group()
    trained = {name for name, _ in outline.trained}
    mine = owned((share for share in shares if share.name in outline.forms), outline.names)
    mine = [share for share in mine if share.name not in stays]
    boxes = [share for share in shares if share.name in trained]
    gradients, moments = _bytes(box.local for box in boxes), moments_of(local)
    counts = STEP_BYTES * len(boxes) if moments == 2 else 0
    return RankNeeds(
        rank=rank,
        boxes=len(shares),
        own_boxes=len(mine),
        held=held,
        own=sum(share.piece.num_bytes for share in mine),
        gradients=gradients,
        optimizer=None if moments is None else moments * gradients + counts,
    )


def _parts(model: nn.Module, plan: Plan, axes: Axes) -> list[nn.Module]:
    """Return the parts of this rank; copies of a whole model need no wrapper, which would talk to the others."""
    if not plan.is_divided:
        return [model]
    optimization = Optimization(loss=_never, make_optimizer=no_optimizer)
    return list(assemble(model, plan, optimization, axes=axes, rows=plan.microbatches).parts)


def _never(_outputs: object, _targets: object) -> torch.Tensor:
    raise AssertionError("nothing is trained here")


def _tensors(parts: Iterable[nn.Module]) -> Iterator[torch.Tensor]:
    """Yield the local shards of this rank's parameters and buffers."""
    for part in parts:
        for tensor in (*part.parameters(), *part.buffers()):
            yield tensor.to_local() if isinstance(tensor, DTensor) else tensor


def _bytes(tensors: Iterable[torch.Tensor]) -> int:
    return sum(tensor.numel() * tensor.element_size() for tensor in tensors)
