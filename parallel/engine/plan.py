"""The plan of a training: all settings of how it is computed on a mesh, none of what it learns."""

import math
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any

from atoll.ground.faults import Refused
from atoll.parallel.communication.compression import parse_compression
from atoll.parallel.communication.outer_config import parse_outer
from atoll.parallel.engine.mesh import Mesh, meshes, parse_mesh
from atoll.task.overrides import overridden

SCHEDULES = {
    "gpipe": ("GPipe", 1),
    "1f1b": ("1F1B", 1),
    "interleaved-1f1b": ("Interleaved1F1B", 2),
    "looped-bfs": ("LoopedBFS", 2),
    "interleaved-zero-bubble": ("InterleavedZeroBubble", 2),
    "zbv-zero-bubble": ("ZBVZeroBubble", 2),
    "dualpipe-v": ("DualPipeV", 2),
}
"""The pipeline schedules by Atoll's name: torch's name, and the least number of stages on a rank."""

V_SHAPED = ("zbv-zero-bubble", "dualpipe-v")
"""Schedules in which the model goes down the ranks and comes back: rank r of p has the stages r and 2p - 1 - r."""

SPLIT = ("interleaved-zero-bubble", "zbv-zero-bubble", "dualpipe-v")
"""Schedules with two backward passes through a stage: for the gradients of its inputs, and later for those of its
weights."""

FULL = ("1f1b", "dualpipe-v")
"""Schedules that need at least one micro-batch for each stage."""

AUTO = "auto"
"""The mesh that `planner/choice` chooses."""

PRECISIONS = ("fp32", "bf16")
RECOMPUTE = ("none", "selective", "full")
BATCHNORM = ("local", "sync")


@dataclass(frozen=True, slots=True, kw_only=True)
class Plan:
    """The computation of each step. Under every plan the losses are those of one process."""

    mesh: Mesh = field(default_factory=Mesh)
    """The degree of each axis."""

    zero: int | None = None
    """The state that the ranks of dp_shard divide among them (Rajbhandari et al. 2020): 1 the optimizer state, 2 also
    the gradients, 3 also the parameters; 0 none. None: 3 if dp_shard > 1 (2 under a pipeline), else 0."""

    accumulate: int = 1
    """Micro-batches of one step, one after another (>= 1). ZeRO 0 and 1 synchronize after the last alone; 2 and 3 after
    each, for their gradients are never whole."""

    schedule: str = "1f1b"
    """The order of a pipeline's forward and backward passes."""

    num_microbatches: int | None = None
    """Micro-batches of a pipeline (>= 1); None: twice the stages."""

    stages_per_rank: int | None = None
    """Stages on each rank of an interleaved schedule (>= 2); None: 2."""

    sequence_parallel: bool = True
    """Shard the activations between the layers along the sequence, under tp (Korthikanti et al. 2022)."""

    loss_parallel: bool = False
    """Leave the logits sharded along the vocabulary, under tp, and compute the cross entropy from the shards."""

    precision: str = "fp32"
    """The precision: fp32, or bf16 (computed in bfloat16 with float32 master weights, gradients and optimizer
    state)."""

    reduce_dtype: str = "fp32"
    """The dtype in which gradients are reduced: fp32 or bf16."""

    compression: str = "none"
    """The compression of DDP's gradients: none, fp16, bf16, int8, onebit, powersgd:RANK."""

    recompute: str = "none"
    """The activations that are recomputed: none; selective: all but the products of matrices and attention; full: all
    but the inputs of a block."""

    offload: bool = False
    """Put parameters, gradients and optimizer state in host memory, where the optimizer steps."""

    compile: bool = False
    """Compile each block (`torch.compile`)."""

    batchnorm: str = "local"
    """Statistics of batch norms: local to a rank, sync over all ranks with data, ghost:N for virtual batches of N
    examples of the global batch. With local, another number of ranks is another model."""

    outer: str = "none"
    """Synchronization of the copies along dp_replicate: none means in each step; local_sgd:H, diloco:H and delayed:D do
    it rarely or late."""

    def __post_init__(self) -> None:
        if faults := list(_faults(self)):
            raise Refused(*faults)

    @property
    def zero_stage(self) -> int:
        """The stage of ZeRO, with the default for None."""
        if self.zero is not None:
            return self.zero
        return 0 if self.mesh.dp_shard == 1 else 2 if self.mesh.pp > 1 else 3

    @property
    def is_divided(self) -> bool:
        """Whether a rank has a part of the model: shards, parts of layers or a stage."""
        return self.is_sharded or self.mesh.tp > 1 or self.mesh.pp > 1

    @property
    def is_sharded(self) -> bool:
        """Whether the plan uses `fully_shard`: also where nothing is sharded but wrappers must compose, or cast."""
        mesh = self.mesh
        needs_composition = (mesh.tp > 1 or mesh.pp > 1) and (self.synced_dp > 1 or self.precision == "bf16")
        return self.zero_stage > 0 or mesh.dp_shard > 1 or self.offload or needs_composition

    @property
    def is_ddp(self) -> bool:
        """Whether the plan uses `DistributedDataParallel`."""
        return not self.is_sharded and self.synced_dp > 1

    @property
    def synced_dp(self) -> int:
        """Ranks of data parallelism whose gradients are summed in each step."""
        return self.mesh.dp_shard * (self.mesh.dp_replicate if self.outer == "none" else 1)

    @property
    def stages(self) -> int:
        """Stages of each rank of the pipeline."""
        return max(self.stages_per_rank or SCHEDULES[self.schedule][1], 1) if self.mesh.pp > 1 else 1

    @property
    def num_stages(self) -> int:
        """Stages of the whole pipeline."""
        return self.mesh.pp * self.stages

    @property
    def microbatches(self) -> int:
        """Micro-batches of a step: of the pipeline, or of the accumulation."""
        if self.mesh.pp == 1:
            return self.accumulate
        return self.num_microbatches or 2 * self.num_stages

    @property
    def divides(self) -> bool:
        """Whether a global batch is divided, over ranks or micro-batches."""
        return self.mesh.dp * self.microbatches > 1


def stages_of(rank: int, plan: Plan) -> list[int]:
    """Return the stages of the pipeline on a rank of the `pp` axis, ascending."""
    if plan.schedule in V_SHAPED:
        return [rank, plan.num_stages - 1 - rank]
    return list(range(rank, plan.num_stages, plan.mesh.pp))


def given_plan(mesh: str, settings: Mapping[str, Any]) -> Plan:
    """Return the plan that a command line or a TOML names, where `dp` is dp_replicate (DDP), or dp_shard with ZeRO.

    Args:
        mesh: `axis=degree`, comma-separated (`parse_mesh`).
        settings: the plan's fields but the mesh, or their text from a command line.

    Raises:
        ValueError: values are not allowed; the message lists all faults, separated by "; ".
    """
    are_copies = str(settings.get("zero", "none")) in ("none", "0")
    return overridden(Plan(mesh=parse_mesh(mesh, replicate=are_copies)), "plan", settings, hidden=("mesh",))


def possible_plans(num_ranks: int, settings: Mapping[str, Any]) -> list[Plan]:
    """Return the plans of all meshes of a number of ranks, without pipelines, with every stage of ZeRO.

    Args:
        num_ranks: the number of ranks of the mesh (>= 1).
        settings: the settings, as for `given_plan`; with `zero` only this ZeRO stage.

    Raises:
        ValueError: no mesh has these settings; the message lists the first mesh's faults, separated by "; ".
    """
    found, faults = [], []
    for mesh in (mesh for mesh in meshes(num_ranks) if mesh.pp == 1):
        stages = ("none",) if mesh.dp_shard == 1 or "zero" in settings else ("1", "2", "3")
        for zero in stages:
            try:
                found.append(overridden(Plan(mesh=mesh), "plan", {"zero": zero, **settings}, hidden=("mesh",)))
            except ValueError as error:
                faults.append(str(error))
    if not found:
        raise ValueError(faults[0])
    return found


def _faults(plan: Plan) -> Iterator[str]:
    rules = [
        (plan.zero in (None, 0, 1, 2, 3), "zero", "must be 0, 1, 2, 3 or none"),
        (plan.accumulate >= 1, "accumulate", "must be at least 1"),
        (plan.schedule in SCHEDULES, "schedule", f"must be one of {', '.join(SCHEDULES)}"),
        (plan.num_microbatches is None or plan.num_microbatches >= 1, "num_microbatches", "must be at least 1 or none"),
        (plan.stages_per_rank is None or plan.stages_per_rank >= 1, "stages_per_rank", "must be at least 1 or none"),
        (plan.precision in PRECISIONS, "precision", f"must be one of {', '.join(PRECISIONS)}"),
        (plan.reduce_dtype in PRECISIONS, "reduce_dtype", f"must be one of {', '.join(PRECISIONS)}"),
        (plan.recompute in RECOMPUTE, "recompute", f"must be one of {', '.join(RECOMPUTE)}"),
        (_is_batchnorm(plan.batchnorm), "batchnorm", f"must be one of {', '.join(BATCHNORM)}, ghost:N with N >= 2"),
    ]
    wrong = [f"plan.{name}: {rule}, got {getattr(plan, name)!r}" for is_met, name, rule in rules if not is_met]
    for parse, text in ((parse_compression, plan.compression), (parse_outer, plan.outer)):
        try:
            parse(text)
        except ValueError as error:
            wrong.append(f"plan.{error}")
    yield from wrong or _conflicts(plan)


def _conflicts(plan: Plan) -> Iterator[str]:
    """Yield the values that exclude each other, given that each of them is valid."""
    mesh = plan.mesh
    least = SCHEDULES[plan.schedule][1]
    if mesh.dp_shard > 1 and plan.zero == 0:
        yield f"plan.zero: 0 shards nothing, so dp_shard must be 1 (use dp_replicate), got dp_shard={mesh.dp_shard}"
    if mesh.pp > 1:
        yield from _pipeline_conflicts(plan, least)
    elif plan.num_microbatches is not None:
        yield f"plan.num_microbatches: belongs to a pipeline (pp > 1), got {plan.num_microbatches}; see accumulate"
    if plan.loss_parallel and mesh.tp == 1:
        yield "plan.loss_parallel: needs tp > 1, got tp=1"
    if plan.compression != "none" and not plan.is_ddp:
        yield (
            f"plan.compression: {plan.compression} is a hook of DDP: dp_replicate > 1 without dp_shard, tp, pp, zero; "
            f"got {mesh}, zero={plan.zero_stage}; reduce_dtype=bf16 is for the others"
        )
    if plan.reduce_dtype != "fp32" and plan.is_ddp:
        yield f"plan.reduce_dtype: {plan.reduce_dtype} is for fully_shard; under DDP it is compression=bf16"
    if plan.offload and plan.zero == 0:
        yield "plan.offload: needs zero 1, 2 or 3, got zero=0"
    if plan.batchnorm.startswith("ghost") and plan.microbatches > 1:
        yield (
            f"plan.batchnorm: the virtual batches of {plan.batchnorm} are those of a whole batch, got "
            f"{plan.microbatches} micro-batches; allowed: 1, or local or sync"
        )
    if plan.outer != "none" and mesh.dp_replicate == 1:
        yield f"plan.outer: {plan.outer} is between copies, so dp_replicate must be more than 1, got 1"


def _pipeline_conflicts(plan: Plan, least: int) -> Iterator[str]:
    if plan.accumulate > 1:
        yield f"plan.accumulate: a pipeline has num_microbatches instead, got accumulate={plan.accumulate}"
    if least == 1 and plan.stages_per_rank not in (None, 1):
        yield f"plan.stages_per_rank: {plan.schedule} has 1, got {plan.stages_per_rank}"
    if least > 1 and plan.stages < least:
        yield f"plan.stages_per_rank: {plan.schedule} needs at least {least}, got {plan.stages}"
    if plan.schedule in V_SHAPED and plan.stages != 2:
        yield f"plan.stages_per_rank: {plan.schedule} has exactly 2, got {plan.stages}"
    if (
        plan.schedule.startswith("interleaved")
        and plan.microbatches % plan.mesh.pp
        and plan.microbatches > plan.mesh.pp
    ):
        yield (f"plan.num_microbatches: {plan.schedule} needs a multiple of pp={plan.mesh.pp}, got {plan.microbatches}")
    if plan.schedule in SPLIT and plan.zero_stage == 3:
        yield f"plan.zero: {plan.schedule} needs its weights until their gradients are computed: 1 or 2, got 3"
    if plan.schedule in SPLIT and plan.recompute != "none":
        yield f"plan.recompute: {plan.schedule} has two backward passes per stage: must be none, got {plan.recompute}"
    if plan.schedule in FULL and plan.microbatches < plan.num_stages:
        stages = plan.num_stages
        yield f"plan.num_microbatches: {plan.schedule} needs at least {stages}, its stages, got {plan.microbatches}"


def _is_batchnorm(text: str) -> bool:
    kind, _, size = text.partition(":")
    if kind == "ghost":
        return size.isdecimal() and int(size) >= 2 and math.isfinite(int(size))
    return text in BATCHNORM
