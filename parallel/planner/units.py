"""What a rank holds of a model, and the units in which that is gathered and reduced.

A unit is a block, or what a stage has beside its blocks (embedding, last norm, head). Tensor parallelism cuts a weight
along its axis; sharding over data then cuts what is left along axis 0, into pieces of ceil(n / d) rows of which the
last may be smaller or empty (torch's `fully_shard`).
"""

from dataclasses import dataclass
from functools import lru_cache
from math import prod

from atoll.parallel.planner.candidate import Candidate, coordinates, stages, stages_of
from atoll.parallel.planner.shape import ModelShape, Weight


@dataclass(frozen=True, slots=True)
class Share:
    """A rank's part of a model, or of one unit of it, in elements."""

    held: int = 0
    """Of the rank's own shards."""

    gathered: int = 0
    """Of the same tensors on all shards together, with the rows that pad every shard to equal length."""

    whole: int = 0
    """The same without that padding."""

    num_tensors: int = 0
    """Parameters."""

    num_units: int = 0
    """Units."""

    largest: int = 0
    """`gathered` of the largest unit."""

    in_turn: int = 0
    """`gathered` of what is there at once when blocks are gathered in turn: two of them, and the rest of the stages."""


def share(model: ModelShape, candidate: Candidate, rank: int) -> Share:
    """What a rank of the mesh holds, in all of its stages."""
    mesh, at = candidate.mesh, coordinates(candidate.mesh, rank)
    own = tuple(stages_of(candidate.plan, at["pp"]))
    return _share(model, candidate.plan.num_stages, own, mesh.tp, mesh.dp_shard, at["dp_shard"])


@lru_cache(maxsize=65536)
def _share(model: ModelShape, num_stages: int, own: tuple[int, ...], tp: int, shards: int, index: int) -> Share:
    cut = stages(model, num_stages)
    block = _unit(model.block(), tp, shards, index)
    num_blocks = sum(cut[stage].num_blocks for stage in own)
    rest = [_unit(cut[stage].ends, tp, shards, index) for stage in own if cut[stage].ends]
    found = [*[block] * num_blocks, *rest]
    return Share(
        held=sum(unit.held for unit in found),
        gathered=sum(unit.gathered for unit in found),
        whole=sum(unit.whole for unit in found),
        num_tensors=sum(unit.num_tensors for unit in found),
        num_units=len(found),
        largest=max((unit.gathered for unit in found), default=0),
        in_turn=min(2, num_blocks) * block.gathered + sum(unit.gathered for unit in rest),
    )


def _unit(weights: tuple[Weight, ...], tp: int, shards: int, index: int) -> Share:
    held = whole = gathered = 0
    for weight in weights:
        rows, *rest = (n // tp if axis == weight.cut else n for axis, n in enumerate(weight.shape))
        row = prod(rest)
        held += row * chunk(rows, shards, index)
        whole += row * rows
        gathered += row * -(-rows // shards) * shards
    return Share(held, gathered, whole, len(weights))


def chunk(rows: int, shards: int, index: int) -> int:
    """How many of the rows one of the shards has."""
    longest = -(-rows // shards)
    return max(0, min(longest, rows - index * longest))
