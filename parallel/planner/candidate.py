"""A candidate of the search: the engine's plan, with the sizes that the plan leaves open."""

from dataclasses import dataclass, field
from functools import lru_cache
from itertools import pairwise

from atoll.ground.printable import count_of
from atoll.parallel.engine.blueprint import balanced
from atoll.parallel.engine.mesh import AXES, Mesh
from atoll.parallel.engine.plan import V_SHAPED, Plan
from atoll.parallel.planner.cluster import Cluster
from atoll.parallel.planner.shape import ModelShape, Weight

ITEM_BYTES = {"bf16": 2, "fp32": 4}
"""Size of an activation's element by precision [bytes]."""

MOMENTS = {"sgd": 0, "momentum": 1, "novograd": 1, "adam": 2, "adamw": 2, "lamb": 2}
"""Numbers of state for each parameter, in fp32, by optimizer."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Candidate:
    """A way to train a model on a cluster: the formulas judge it, and the search chooses among all."""

    plan: Plan = field(default_factory=Plan)
    """The mesh, and the parallelism on it."""

    microbatch: int = 1
    """Sequences in one micro-batch of one rank (b >= 1)."""

    optimizer: str = "adamw"
    """The optimizer, which determines the state: one of `MOMENTS`."""

    def __post_init__(self) -> None:
        if type(self.microbatch) is not int or self.microbatch < 1:
            raise ValueError(f"microbatch: must be a whole number >= 1, got {self.microbatch!r}")
        if self.optimizer not in MOMENTS:
            raise ValueError(f"optimizer: must be one of {', '.join(MOMENTS)}, got {self.optimizer!r}")

    @property
    def mesh(self) -> Mesh:
        """The degrees of the mesh."""
        return self.plan.mesh

    @property
    def batch(self) -> int:
        """Sequences of one step, on all ranks together."""
        return self.mesh.dp * self.plan.microbatches * self.microbatch

    @property
    def item_bytes(self) -> int:
        """Bytes of one element of an activation, and of a parameter when it is gathered."""
        return ITEM_BYTES[self.plan.precision]

    @property
    def cut_tokens(self) -> int:
        """The number of ranks over which the residual stream is sharded: tp under sequence parallelism, else 1."""
        return self.mesh.tp if self.plan.sequence_parallel else 1


def stride(mesh: Mesh, axis: str) -> int:
    """Return the distance in rank of two neighbours on an axis."""
    distance = 1
    for inner in AXES[AXES.index(axis) + 1 :]:
        distance *= mesh.degrees[inner]
    return distance


def crosses(mesh: Mesh, axis: str, cluster: Cluster) -> bool:
    """Return whether some group along the axis has members on more than one node."""
    return cluster.spans_nodes(stride(mesh, axis), mesh.degrees[axis])


def coordinates(mesh: Mesh, rank: int) -> dict[str, int]:
    """Return the coordinate of a rank on each axis."""
    return {axis: rank // stride(mesh, axis) % degree for axis, degree in mesh.degrees.items()}


def stages_of(plan: Plan, pp_rank: int) -> list[int]:
    """Return the stages of a rank of the pipeline."""
    if plan.mesh.pp > 1 and plan.schedule in V_SHAPED:
        return [pp_rank, plan.num_stages - 1 - pp_rank]
    return list(range(pp_rank, plan.num_stages, plan.mesh.pp))


@dataclass(frozen=True, slots=True)
class Stage:
    """The parts of the model in one stage of the pipeline."""

    num_blocks: int
    """The number of blocks."""

    has_embedding: bool
    """Whether tokens enter the stage."""

    has_head: bool
    """Whether the stage computes logits."""

    ends: tuple[Weight, ...]
    """The parameters that belong to no block."""


@lru_cache(maxsize=1024)
def stages(model: ModelShape, num_stages: int) -> tuple[Stage, ...]:
    """Cut the model into the stages of a pipeline, by the engine's rule.

    Raises:
        ValueError: fewer pieces than stages.
    """
    weights = {"embed": 0.1, "norm": 0.1, "head": max(0.1, model.vocab / (12 * model.hidden))}  # as in models.decoder
    names = ["embed", *["block"] * model.layers, "norm", "head"]
    if num_stages > len(names):
        raise ValueError(
            f"{count_of(len(names), 'piece')} (embedding, {count_of(model.layers, 'block')}, norm, head) "
            f"for {count_of(num_stages, 'stage')}"
        )
    bounds = [0, *balanced([weights.get(name, 1.0) for name in names], num_stages), len(names)]
    return tuple(_stage(model, names[start:end], num_stages) for start, end in pairwise(bounds))


def _stage(model: ModelShape, names: list[str], num_stages: int) -> Stage:
    table = Weight("head", (model.vocab, model.hidden), 0)
    *norm, _ = model.head() if not model.tied else (*model.head(), table)
    parts = {
        "embed": model.embedding(),
        "norm": tuple(norm),
        "head": () if model.tied and num_stages == 1 else (table,),
    }
    ends = tuple(weight for name in names for weight in parts.get(name, ()))
    return Stage(names.count("block"), "embed" in names, "head" in names, ends)
