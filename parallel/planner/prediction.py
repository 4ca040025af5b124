"""The predicted time of one step on a cluster, by part.

    compute   passes of the slowest stage by the sizes of its products and by the bytes that it moves (`speed`)
    update    the optimizer's step
    tensor    collectives of tensor parallelism inside the blocks: waited for
    idle      (compute + tensor) x bubble / (1 - bubble)
    data      collectives of parameters and gradients, beyond the computation that hides them: all of it for parameters
              gathered in every micro-batch, the backward's two thirds for gradients reduced in every one, and one
              micro-batch's alone for those that move once in a step; and CONTENTION of what is hidden
    fill      the first activations through the pipeline and the last gradients back; the others hide behind compute

    step = compute + tensor + idle + data + fill + update

These are predictions of a model with a dozen numbers of a cluster, for ranking plans: within 15 % of published runs
whose settings are known (`docs/planning.md`). Measure before you buy.
"""

from dataclasses import dataclass, fields

from atoll.parallel.planner.bubble import actions, bubble, simulate
from atoll.parallel.planner.candidate import Candidate, stride
from atoll.parallel.planner.cluster import Cluster
from atoll.parallel.planner.memory import Memory, block_input, worst
from atoll.parallel.planner.shape import ModelShape
from atoll.parallel.planner.speed import computation, peak_of, update
from atoll.parallel.planner.traffic import SEND, Traffic, traffic

CONTENTION = 0.6
"""Part of a hidden collective's time that computation loses: its kernels take processors and memory bandwidth."""


@dataclass(frozen=True, slots=True)
class Times:
    """The parts of one step's time [s]."""

    compute: float
    tensor: float
    idle: float
    data: float
    fill: float
    update: float

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
    compute = computation(model, candidate, cluster)
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
        update=update(model, candidate, cluster),
    )
    tokens = candidate.batch * model.sequence
    mfu = model.flops(tokens) / (times.step * mesh.size * peak_of(candidate, cluster))
    return Prediction(candidate, worst(model, candidate, counted=counted), times, share, tokens / times.step, mfu)


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
    return cluster.seconds(
        item.sent, item.steps, stride=stride(candidate.mesh, item.axis), degree=candidate.mesh.degrees[item.axis]
    )


def sent_by(model: ModelShape, candidate: Candidate, pp_rank: int) -> list[Traffic]:
    """Return the traffic of the first data and tensor rank of a stage."""
    return traffic(model, candidate, pp_rank * (candidate.mesh.size // candidate.mesh.pp))


def _exposed(sent: list[Traffic], candidate: Candidate, cluster: Cluster, compute: float) -> float:
    """Return the time that the traffic of parameters and gradients adds to the step."""
    shared = (item for item in sent if item.axis != "tp" and item.kind != SEND)
    return sum(_beyond(seconds(item, candidate, cluster), item.window * compute) for item in shared)


def _beyond(transfer: float, window: float) -> float:
    """Return the time that a transfer adds to a step: the unhidden part, and CONTENTION of the hidden part."""
    hidden = min(transfer, window)
    return transfer - hidden + CONTENTION * hidden


def _fill(model: ModelShape, candidate: Candidate, cluster: Cluster) -> float:
    mesh = candidate.mesh
    once = cluster.seconds(block_input(model, candidate), 1, stride=stride(mesh, "pp"), degree=mesh.pp)
    return 2 * (mesh.pp - 1) * once
