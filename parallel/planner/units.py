"""A rank's part of a model, and the units in which parameters are gathered and reduced.

A unit is a block, or the rest of a stage beside its blocks (embedding, last norm, head). Tensor parallelism shards a
weight along its axis; data sharding then shards the rest along axis 0, into pieces of ceil(n / d) rows of which the
last may be smaller or empty (torch's `fully_shard`).
"""

from collections.abc import Sequence
from dataclasses import dataclass
from functools import lru_cache
from math import prod

from atoll.parallel.planner.candidate import Candidate, coordinates, stages, stages_of
from atoll.parallel.planner.shape import ModelShape, Weight


@dataclass(frozen=True, slots=True)
class Share:
    """A rank's part of a model, or of one unit of it, in elements."""

    local: int = 0
    """Elements of the rank's shards."""

    gathered: int = 0
    """Elements of the rank's tensors on all shards together, with the rows that pad every shard to equal length."""

    whole: int = 0
    """Elements of the rank's tensors on all shards together, without padding."""

    num_tensors: int = 0
    """The number of parameter tensors."""

    num_units: int = 0
    """The number of units."""

    largest: int = 0
    """The `gathered` of the largest unit."""

    in_turn: int = 0
    """The largest `gathered` at once if blocks are gathered in turn: two of them, and the rest of the stages."""


def share(model: ModelShape, candidate: Candidate, rank: int) -> Share:
    """Return the part of a rank of the mesh, in all of its stages."""
    mesh, at = candidate.mesh, coordinates(candidate.mesh, rank)
    local_stages = tuple(stages_of(candidate.plan, at["pp"]))
    return _share(model, candidate.plan.num_stages, local_stages, mesh.tp, mesh.dp_shard, at["dp_shard"])


@lru_cache(maxsize=65536)
def _share(
    model: ModelShape, num_stages: int, local_stages: tuple[int, ...], tp: int, shards: int, index: int
) -> Share:
    cut = stages(model, num_stages)
    block = unit(model.block(), tp, shards, index)
    num_blocks = sum(cut[stage].num_blocks for stage in local_stages)
    rest = [unit(cut[stage].ends, tp, shards, index) for stage in local_stages if cut[stage].ends]
    return joined([block] * num_blocks, rest)


def joined(blocks: Sequence[Share], rest: Sequence[Share]) -> Share:
    """Add up units of a rank into one `Share`: blocks, which are gathered in turn, and the rest beside them."""
    found = [*blocks, *rest]
    in_turn = sum(sorted((block.gathered for block in blocks), reverse=True)[:2])
    return Share(
        local=sum(unit.local for unit in found),
        gathered=sum(unit.gathered for unit in found),
        whole=sum(unit.whole for unit in found),
        num_tensors=sum(unit.num_tensors for unit in found),
        num_units=len(found),
        largest=max((unit.gathered for unit in found), default=0),
        in_turn=in_turn + sum(unit.gathered for unit in rest),
    )


def unit(weights: Sequence[Weight], tp: int, shards: int, index: int) -> Share:
    """Return the part of a rank in one unit.

    Args:
        weights: the weights of the unit.
        tp: the degree of tensor parallelism.
        shards: the degree of data sharding.
        index: the index of the rank among the shards.
    """
    local = whole = gathered = 0
    for weight in weights:
        rows, *rest = (n // tp if axis == weight.cut else n for axis, n in enumerate(weight.shape))
        row = prod(rest)
        local += row * chunk(rows, shards, index)
        whole += row * rows
        gathered += row * -(-rows // shards) * shards
    return Share(local, gathered, whole, len(weights))


def chunk(rows: int, shards: int, index: int) -> int:
    """Return the number of rows in one of the shards."""
    longest = -(-rows // shards)
    return max(0, min(longest, rows - index * longest))
