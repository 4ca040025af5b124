"""The computation of one rank in a step: seconds of its matrix products, attention, and bytes of its memory.

Legend: M x N x K a product's sizes, e `efficiency`, F the peak [operations/s], B the memory's bandwidth [bytes/s].

    product       2 M N K / (e F) x (1 + EDGES (F / B) (1 / M + 1 / N + 1 / K)): narrow layers and small micro-batches
                  move more bytes for each operation than wide ones
    attention     4 s h for each token / (`attention` F)
    the rest      norms, residual sums and activation of a block: (10 h + 3 f) elements, with gelu 2 f, read or written;
                  MOVES times, since kernels are not fused, / B
    logits        LOGIT bytes for each of them / B, of which the loss and its gradient are made in fp32
    update        UPDATE bytes for each local parameter / B, once in a step

Forward and backward pass take three times the forward pass alone; full recomputation takes it once more, selective
recomputation repeats all but products and attention. EDGES, MOVES and LOGIT are fitted to published runs of A100 and
H100 (`docs/planning.md`); launches of kernels are not counted, so models of narrow layers, run eagerly, are slower.
"""

from dataclasses import dataclass

from atoll.parallel.planner.candidate import Candidate, stages, stages_of
from atoll.parallel.planner.cluster import Cluster
from atoll.parallel.planner.shape import ModelShape, Weight
from atoll.parallel.planner.units import share

EDGES = 1.7
"""Share of a product's operands whose transfer no computation hides."""

MOVES = 2.0
"""Bytes that a block's kernels move beside products and attention, in multiples of one read or write of each value."""

LOGIT = 30
"""Bytes that head and loss move for each logit: cast, log-softmax and two gradients."""

UPDATE = 40
"""Bytes that norm and AdamW move for each local parameter: weight, gradient and two moments, some of them twice."""


@dataclass(frozen=True, slots=True)
class BlockTimes:
    """The seconds of one forward pass of a block for one micro-batch."""

    expensive: float
    """Products and attention."""
    cheap: float
    """Norms, sums and activation."""


def peak_of(candidate: Candidate, cluster: Cluster) -> float:
    """Return the peak operations per second of the candidate's precision."""
    return cluster.flops if candidate.plan.precision == "bf16" else cluster.flops_fp32


def computation(model: ModelShape, candidate: Candidate, cluster: Cluster) -> float:
    """Return the seconds of all passes of the slowest stage in one step, without the optimizer."""
    plan, mesh = candidate.plan, candidate.mesh
    block, head = _passes(block_times(model, candidate, cluster), plan.recompute), _head(model, candidate, cluster)
    cut = stages(model, plan.num_stages)
    ranks = ([cut[stage] for stage in stages_of(plan, rank)] for rank in range(mesh.pp))
    slowest = max(sum(stage.num_blocks * block + stage.has_head * head for stage in held) for held in ranks)
    return plan.microbatches * slowest


def update(model: ModelShape, candidate: Candidate, cluster: Cluster) -> float:
    """Return the seconds of the optimizer's step of the rank with most parameters."""
    step = candidate.mesh.size // candidate.mesh.pp
    return (
        UPDATE * max(share(model, candidate, pp * step).local for pp in range(candidate.mesh.pp)) / cluster.memory_rate
    )


def block_times(model: ModelShape, candidate: Candidate, cluster: Cluster) -> BlockTimes:
    """Return the seconds of one forward pass of a block."""
    t = candidate.mesh.tp
    tokens = model.sequence * candidate.microbatch
    matrices = [weight for weight in model.block() if len(weight.shape) == 2]
    products = sum(_product(tokens, _local(weight, t), candidate, cluster) for weight in matrices)
    attention = 4 * tokens * model.sequence * model.hidden / t / (cluster.attention * peak_of(candidate, cluster))
    activation = (2 if model.mlp == "gelu" else 3) * model.width / t
    elements = tokens * (10 * model.hidden / candidate.cut_tokens + activation)
    return BlockTimes(products + attention, MOVES * candidate.item_bytes * elements / cluster.memory_rate)


def _passes(times: BlockTimes, recompute: str) -> float:
    again = {"none": (3, 3), "selective": (3, 4), "full": (4, 4)}[recompute]
    return again[0] * times.expensive + again[1] * times.cheap


def _head(model: ModelShape, candidate: Candidate, cluster: Cluster) -> float:
    t = candidate.mesh.tp
    tokens = model.sequence * candidate.microbatch
    logits = tokens * model.vocab / (t if candidate.plan.loss_parallel else 1)
    product = _product(tokens, (model.vocab / t, model.hidden), candidate, cluster)
    return 3 * product + LOGIT * logits / cluster.memory_rate


def _product(tokens: float, matrix: tuple[float, float], candidate: Candidate, cluster: Cluster) -> float:
    rows, columns = matrix
    peak = peak_of(candidate, cluster)
    edges = EDGES * peak / cluster.memory_rate * (1 / tokens + 1 / rows + 1 / columns)
    return 2 * tokens * rows * columns / (cluster.efficiency * peak) * (1 + edges)


def _local(weight: Weight, t: int) -> tuple[float, float]:
    """Return the shape of a matrix's shard on one rank of a tensor-parallel group."""
    rows, columns = (side / t if axis == weight.cut else float(side) for axis, side in enumerate(weight.shape))
    return rows, columns
