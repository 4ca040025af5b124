"""The predicted time of one step on a cluster, by part.

    compute   operations of the slowest stage / (efficiency x peak); recomputation runs the blocks' forward twice
    tensor    collectives of tensor parallelism inside the blocks: waited for
    idle      (compute + tensor) x bubble / (1 - bubble)
    data      collectives of parameters and gradients, beyond the computation that hides them: all of it for parameters
              gathered in every micro-batch, the backward's two thirds for gradients reduced in every one, and one
              micro-batch's alone for those that move once in a step
    fill      the first activations through the pipeline and the last gradients back; the others travel behind compute

    step = compute + tensor + idle + data + fill

These are predictions of a model with six numbers of a cluster, for ranking plans; measure before you buy.
"""

from dataclasses import dataclass, fields

from atoll.parallel.planner.bubble import actions, bubble, simulate
from atoll.parallel.planner.candidate import Candidate, crosses, stages, stages_of
from atoll.parallel.planner.cluster import Cluster
from atoll.parallel.planner.memory import Memory, block_input, worst
from atoll.parallel.planner.shape import ModelShape
from atoll.parallel.planner.traffic import SEND, Traffic, traffic


@dataclass(frozen=True, slots=True)
class Times:
    """The parts of one step's time [s]."""

    compute: float
    tensor: float
    idle: float
    data: float
    fill: float

    @property
    def step(self) -> float:
        """The time of the whole step [s]."""
        return float(sum(getattr(self, field.name) for field in fields(self)))


@dataclass(frozen=True, slots=True)
class Prediction:
    """The predicted costs of a candidate."""

    candidate: Candidate
    memory: Memory
    """The memory of the rank that needs most."""
    times: Times
    bubble: float
    """The pipeline's idle share of compute and tensor time."""
    tokens_per_s: float
    """The throughput of all ranks together."""
    mfu: float
    """The model's operations, without recomputation, as a fraction of the devices' peak."""


def predict(model: ModelShape, candidate: Candidate, cluster: Cluster, *, counted: str = "engine") -> Prediction:
    """Predict the costs of one candidate; `counted` as in `memory.memory`."""
    mesh = candidate.mesh
    peak = cluster.flops if candidate.plan.precision == "bf16" else cluster.flops_fp32
    compute = stage_flops(model, candidate) / (peak * cluster.efficiency)
    ends = [
        sent_by(model, candidate, pp_rank) for pp_rank in sorted({0, mesh.pp - 1})
    ]  # they also have embedding and head
    tensor = max(sum(seconds(item, candidate, cluster) for item in sent if item.axis == "tp") for sent in ends)
    share = idle_share(candidate)
    times = Times(
        compute=compute,
        tensor=tensor,
        idle=(compute + tensor) * share / (1 - share),
        data=max(_exposed(sent, candidate, cluster, compute) for sent in ends),
        fill=_fill(model, candidate, cluster),
    )
    tokens = candidate.batch * model.sequence
    mfu = model.flops(tokens) / (times.step * mesh.size * peak)
    return Prediction(candidate, worst(model, candidate, counted=counted), times, share, tokens / times.step, mfu)


def stage_flops(model: ModelShape, candidate: Candidate) -> float:
    """Return the operations of the rank of the slowest stage in one step."""
    plan, mesh = candidate.plan, candidate.mesh
    tokens = model.sequence * candidate.microbatch * plan.microbatches / mesh.tp
    head = 6 * model.vocab * model.hidden
    block = (model.flops(1) - head) / model.layers * (4 / 3 if plan.recompute == "full" else 1)
    cut = stages(model, plan.num_stages)
    ranks = ([cut[stage] for stage in stages_of(plan, rank)] for rank in range(mesh.pp))
    return tokens * max(sum(stage.num_blocks * block + stage.has_head * head for stage in own) for own in ranks)


def idle_share(candidate: Candidate) -> float:
    """Return the bubble of the candidate's pipeline, of equal stages; 0 without one."""
    plan, p = candidate.plan, candidate.mesh.pp
    if p == 1:
        return 0.0
    if plan.stages > 1 and plan.microbatches < p:
        return simulate(actions(plan.schedule, p, plan.microbatches, plan.stages), plan.num_stages)
    return bubble(plan.schedule, p, plan.microbatches, plan.stages)


def seconds(item: Traffic, candidate: Candidate, cluster: Cluster) -> float:
    """Return the time of a rank's collectives of one kind, if no computation hides them."""
    return cluster.seconds(item.sent, item.steps, across=crosses(candidate.mesh, item.axis, cluster))


def sent_by(model: ModelShape, candidate: Candidate, pp_rank: int) -> list[Traffic]:
    """Return the traffic of the first data and tensor rank of a stage."""
    return traffic(model, candidate, pp_rank * (candidate.mesh.size // candidate.mesh.pp))


def _exposed(sent: list[Traffic], candidate: Candidate, cluster: Cluster, compute: float) -> float:
    """Return the time that the traffic of parameters and gradients adds to the step."""
    shared = (item for item in sent if item.axis != "tp" and item.kind != SEND)
    return sum(max(0.0, seconds(item, candidate, cluster) - item.window * compute) for item in shared)


def _fill(model: ModelShape, candidate: Candidate, cluster: Cluster) -> float:
    across = crosses(candidate.mesh, "pp", cluster)
    return 2 * (candidate.mesh.pp - 1) * cluster.seconds(block_input(model, candidate), 1, across=across)
