"""The needs of a site whose client is a mesh: bytes on the wire and on disk, and the share of each rank.

    version     4 P                          the model in fp32, as it comes down
    update      4 P, or what a codec leaves of it
    disk        3 versions (two that stay, one that comes down), 2 updates (one in the spool, one that is written),
                2 checkpoints of weights and moments (the newest stays until the next one is complete)
    part        the boxes that a rank owns: its shards, divided by the number of ranks that hold the same ones

With LoRA of rank r on every matrix of the blocks, r (rows + columns) parameters for each are sent instead of P and have
gradients and moments, and the base lies on the site's disk once: 4 P. Its ranks' memory is then an estimate.
"""

from dataclasses import dataclass, replace
from math import prod

from atoll.parallel.planner.candidate import MOMENTS, Candidate, coordinates, stages, stages_of
from atoll.parallel.planner.memory import FP32, Memory, memory
from atoll.parallel.planner.shape import ModelShape, Weight
from atoll.parallel.planner.units import chunk
from atoll.tensors.codecs.chunks import encoded_bytes
from atoll.tensors.codecs.names import parse_codec

VERSIONS, UPDATES, CHECKPOINTS = 3, 2, 2
"""Files of each kind that lie on the site's disk at the worst moment of a round."""

BLOCK_BYTES = 2**20
"""Values that a rank holds beside its shards while it loads a version or writes its part [bytes]."""

AGENT_BYTES = 64 * 2**20
"""Memory of the agent above that of an idle one, whatever the size of the model [bytes]."""


@dataclass(frozen=True, slots=True)
class RankNeeds:
    """The needs of one rank; ranks with the same ones are listed together."""

    ranks: tuple[int, ...]
    memory: Memory
    """The predicted memory in training."""
    held: int
    """Bytes of the shards that the rank loads from a version."""
    part: int
    """Bytes of the boxes that the rank owns, without a codec; boxes of copies are divided evenly."""
    boxes: int
    """The number of boxes that the rank holds."""


@dataclass(frozen=True, slots=True)
class ClientNeeds:
    """The needs of a site in a run."""

    down: int
    """Bytes of a version, once for the whole site."""
    up: int
    """Bytes of an update, all parts together."""
    disk: dict[str, int]
    """Bytes on the disk that the agent and its ranks share, by purpose."""
    ranks: tuple[RankNeeds, ...]

    def seconds(self, num_bytes: int, line: float) -> float:
        """Return the time of a transfer [s] over a line [bit/s]."""
        return 8 * num_bytes / line


def needs_of(model: ModelShape, candidate: Candidate, *, codec: str = "", lora: int = 0) -> ClientNeeds:
    """Return the needs of a site that trains a model as a candidate plan says.

    Args:
        model: the shape of the model.
        candidate: the plan; its `optimizer` is the local training's.
        codec: name of the update's codec; empty: none.
        lora: the rank of adapters, as of `of_adapters`, which alone are trained and sent; 0: the whole model.

    Raises:
        ValueError: there is no such codec, or the rank is larger than a matrix.
    """
    travels = of_adapters(model, lora) if lora else [weight.size for weight in _all(model)]
    down = FP32 * sum(travels)
    up = down if not codec else sum(encoded_bytes(parse_codec(codec), size) for size in travels)
    moments = MOMENTS[candidate.optimizer]
    disk = {
        "versions": VERSIONS * down,
        "updates": UPDATES * up,
        "checkpoints": CHECKPOINTS * (1 + moments) * down,
    }
    if lora:
        disk["base"] = FP32 * model.parameters
    trained = down / (FP32 * model.parameters)
    return ClientNeeds(down, up, disk, tuple(_ranks(model, candidate, trained)))


def _all(model: ModelShape) -> list[Weight]:
    return [*model.embedding(), *model.block() * model.layers, *model.head()]


def of_adapters(model: ModelShape, rank: int) -> list[int]:
    """Return the sizes of LoRA's A and B of every matrix of the blocks (Hu et al. 2021, section 4.1).

    Raises:
        ValueError: the rank is not positive, or larger than a side of a matrix.
    """
    matrices = [weight.shape for weight in model.block() if len(weight.shape) == 2]
    most = min(map(min, matrices))
    if not 1 <= rank <= most:
        raise ValueError(f"got {rank}; allowed: a rank of 1 to {most}, the smallest side of a matrix")
    return [size for rows, columns in matrices for size in (rank * columns, rows * rank)] * model.layers


def _ranks(model: ModelShape, candidate: Candidate, trained: float) -> list[RankNeeds]:
    """Return the needs of all ranks, equal ones together, in the order of their first rank.

    Args:
        model: the shape of the model.
        candidate: the plan.
        trained: the fraction of the parameters that is trained; 1.0, but for adapters.
    """
    found: dict[tuple[int, int, int, float], list[int]] = {}
    predicted: dict[tuple[int, int, int, float], Memory] = {}
    for rank in range(candidate.mesh.size):
        held, part, boxes = _boxes(model, candidate, rank)
        whole = memory(model, candidate, rank)
        of_rank = replace(whole, gradients=trained * whole.gradients, optimizer=trained * whole.optimizer)
        key = held, round(trained * part), boxes, of_rank.total
        found.setdefault(key, []).append(rank)
        predicted[key] = of_rank
    return [RankNeeds(tuple(ranks), predicted[key], *key[:3]) for key, ranks in found.items()]


def _boxes(model: ModelShape, candidate: Candidate, rank: int) -> tuple[int, int, int]:
    """Return the bytes that a rank holds and owns, and the number of its boxes."""
    mesh, at = candidate.mesh, coordinates(candidate.mesh, rank)
    cut = stages(model, candidate.plan.num_stages)
    held = own = 0.0
    boxes = 0
    for stage in stages_of(candidate.plan, at["pp"]):
        for weight, times in [*((w, cut[stage].num_blocks) for w in model.block()), *((w, 1) for w in cut[stage].ends)]:
            rows, *rest = (n // mesh.tp if axis == weight.cut else n for axis, n in enumerate(weight.shape))
            size = FP32 * prod(rest) * chunk(rows, mesh.dp_shard, at["dp_shard"]) * times
            copies = mesh.dp_replicate * (mesh.tp if weight.cut is None else 1)
            held, own, boxes = held + size, own + size / copies, boxes + times * (size > 0)
    return round(held), round(own), boxes
