"""One way to train a model on a cluster: the engine's plan, with the sizes that the plan leaves open."""

from dataclasses import dataclass, field
from functools import lru_cache
from itertools import pairwise

from atoll.parallel.engine.blueprint import balanced
from atoll.parallel.engine.mesh import AXES, Mesh
from atoll.parallel.engine.plan import V_SHAPED, Plan
from atoll.parallel.planner.cluster import Cluster
from atoll.parallel.planner.shape import ModelShape, Weight

ITEM_BYTES = {"bf16": 2, "fp32": 4}

MOMENTS = {"sgd": 0, "momentum": 1, "novograd": 1, "adam": 2, "adamw": 2, "lamb": 2}
"""By optimizer: the fp32 numbers of state for each parameter."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Candidate:
    """What the formulas judge and the search chooses from."""

    plan: Plan = field(default_factory=Plan)
    """The mesh, and what runs on it."""

    microbatch: int = 1
    """Sequences in one micro-batch of one rank (b >= 1)."""

    optimizer: str = "adamw"
    """Whose state is kept: one of `MOMENTS`."""

    def __post_init__(self) -> None:
        if type(self.microbatch) is not int or self.microbatch < 1:
            raise ValueError(f"microbatch: must be a whole number >= 1, got {self.microbatch!r}")
        if self.optimizer not in MOMENTS:
            raise ValueError(f"optimizer: must be one of {', '.join(MOMENTS)}, got {self.optimizer!r}")

    @property
    def mesh(self) -> Mesh:
        """The degrees."""
        return self.plan.mesh

    @property
    def batch(self) -> int:
        """Sequences of one step, on all ranks together."""
        return self.mesh.dp * self.plan.microbatches * self.microbatch

    @property
    def item_bytes(self) -> int:
        """Bytes of one number of an activation, and of a parameter when it is gathered."""
        return ITEM_BYTES[self.plan.precision]

    @property
    def cut_tokens(self) -> int:
        """Among how many ranks the residual stream of a sequence is cut: tp under sequence parallelism."""
        return self.mesh.tp if self.plan.sequence_parallel else 1


def stride(mesh: Mesh, axis: str) -> int:
    """How far apart in rank two neighbours on an axis are."""
    distance = 1
    for inner in AXES[AXES.index(axis) + 1 :]:
        distance *= mesh.degrees[inner]
    return distance


def crosses(mesh: Mesh, axis: str, cluster: Cluster) -> bool:
    """Whether some group along the axis has members on more than one node."""
    return cluster.spans_nodes(stride(mesh, axis), mesh.degrees[axis])


def coordinates(mesh: Mesh, rank: int) -> dict[str, int]:
    """Where on each axis a rank stands."""
    return {axis: rank // stride(mesh, axis) % degree for axis, degree in mesh.degrees.items()}


def stages_of(plan: Plan, pp_rank: int) -> list[int]:
    """The stages that a rank of the pipeline holds."""
    if plan.mesh.pp > 1 and plan.schedule in V_SHAPED:
        return [pp_rank, plan.num_stages - 1 - pp_rank]
    return list(range(pp_rank, plan.num_stages, plan.mesh.pp))


@dataclass(frozen=True, slots=True)
class Stage:
    """What one stage of the pipeline has."""

    num_blocks: int
    """Blocks."""

    has_embedding: bool
    """Whether tokens enter here."""

    has_head: bool
    """Whether logits leave here."""

    ends: tuple[Weight, ...]
    """The parameters that belong to no block."""


@lru_cache(maxsize=1024)
def stages(model: ModelShape, num_stages: int) -> tuple[Stage, ...]:
    """The model cut into the stages of a pipeline by the engine's own rule.

    Raises:
        ValueError: fewer pieces than stages.
    """
    weights = {"embed": 0.1, "norm": 0.1, "head": max(0.1, model.vocab / (12 * model.hidden))}  # as models.decoder has
    names = ["embed", *["block"] * model.layers, "norm", "head"]
    if num_stages > len(names):
        raise ValueError(f"{len(names)} pieces (embedding, {model.layers} blocks, norm, head) for {num_stages} stages")
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
