"""The traffic of one rank in one step: collectives and bytes, by axis, for parameters, gradients and activations.

Legend: n ranks of a group, M bytes of the group's tensors together. A ring moves through each rank

    all-gather, reduce-scatter   (n - 1) / n  M
    all-reduce                   2 (n - 1) / n  M
    send                         M

ZeRO-1 and -2 gather and reduce each parameter once, which is the volume of DDP's all-reduce; ZeRO-3 gathers it again
for the backward pass: 1.5 times as much. A tensor-parallel block has two all-reduces of its activations in each
direction, or, with the sequence sharded, an all-gather and a reduce-scatter in place of each; recomputation repeats
the forward pass's.

Sources: Rajbhandari et al. 2020, section 7; Shoeybi et al., "Megatron-LM", 2019, section 3; Korthikanti et al. 2022,
section 4.2; Narayanan et al. 2021, section 3.2.
"""

from collections.abc import Iterator
from dataclasses import dataclass

from atoll.parallel.engine.plan import Plan
from atoll.parallel.planner.candidate import Candidate, Stage, coordinates, stages, stages_of
from atoll.parallel.planner.memory import FP32, block_input, reduces_late
from atoll.parallel.planner.shape import ModelShape, Weight
from atoll.parallel.planner.units import Share, chunk, share

GATHER, SCATTER, REDUCE, SEND = "all_gather", "reduce_scatter", "all_reduce", "send"


@dataclass(frozen=True, slots=True)
class Traffic:
    """Collectives of one kind and purpose on one axis."""

    axis: str
    """The axis of the mesh."""
    kind: str
    """The kind: all_gather, reduce_scatter, all_reduce or send."""
    what: str
    """The content: parameters, gradients, activations, logits, loss, tied table."""
    count: int
    """Calls in one step."""
    payload: float
    """Bytes of all calls: of the group's tensors together; for an all-reduce or a send, of the tensor."""
    ranks: int
    """Ranks of the group."""
    behind: str = ""
    """The computation that can hide it; empty: none, it is waited for."""
    window: float = 0.0
    """The share of the step's computation that can hide it."""

    @property
    def sent(self) -> float:
        """Bytes that the rank sends, in a ring."""
        share = (self.ranks - 1) / self.ranks
        return self.payload * {GATHER: share, SCATTER: share, REDUCE: 2 * share, SEND: 1.0}[self.kind]

    @property
    def steps(self) -> int:
        """Messages one after another, each of which waits for the latency of the link."""
        per_call = {GATHER: self.ranks - 1, SCATTER: self.ranks - 1, REDUCE: 2 * (self.ranks - 1), SEND: 1}
        return self.count * per_call[self.kind]


def traffic(model: ModelShape, candidate: Candidate, rank: int = 0) -> list[Traffic]:
    """Return the traffic of a rank in one step by axis, kind and purpose, without single numbers (loss, norm)."""
    part = share(model, candidate, rank)
    found = [*_data(part, candidate), *_tensor(model, candidate, rank), *_pipeline(model, candidate, rank)]
    return [item for item in found if item.count]


def totals(model: ModelShape, candidate: Candidate, rank: int = 0) -> dict[tuple[str, str], tuple[int, int]]:
    """Return calls and bytes by (axis, kind), as a dry run counts them; each send of a pipeline is also a receive."""
    found: dict[tuple[str, str], tuple[int, int]] = {}
    for item in traffic(model, candidate, rank):
        for kind in (SEND, "receive") if item.kind == SEND else (item.kind,):
            calls, num_bytes = found.get((item.axis, kind), (0, 0))
            found[item.axis, kind] = (calls + item.count, num_bytes + round(item.payload))
    return found


# ---------------------------------------------------------------- data parallelism


def _data(part: Share, candidate: Candidate) -> Iterator[Traffic]:
    plan, mesh = candidate.plan, candidate.mesh
    r, d = mesh.dp_replicate if plan.outer == "none" else 1, mesh.dp_shard
    item_bytes = gradient_bytes(plan)
    if plan.is_ddp:
        window = 2 / 3 / plan.microbatches
        yield Traffic("dp_replicate", REDUCE, "gradients", 1, item_bytes * part.whole, r, "backward", window)
        return
    gathers, reductions = _times(candidate)
    # a collective once in a step can hide behind one micro-batch, of which the backward pass is two thirds
    forward, backward = min(1.0, gathers / plan.microbatches), 2 / 3 * reductions / plan.microbatches
    if d > 1:
        calls, size = gathers * part.num_units, gathers * candidate.item_bytes * part.gathered
        yield Traffic("dp_shard", GATHER, "parameters", calls, size, d, "forward, backward", forward)
        calls, size = reductions * part.num_units, reductions * item_bytes * part.gathered
        yield Traffic("dp_shard", SCATTER, "gradients", calls, size, d, "backward", backward)
    if r > 1:
        calls, size = reductions * part.num_units, reductions * item_bytes * part.gathered // d
        yield Traffic("dp_replicate", REDUCE, "gradients", calls, size, r, "backward", backward)


def gradient_bytes(plan: Plan) -> int:
    """Return the bytes of one element of a gradient in transit, or waiting for it."""
    return 2 if plan.reduce_dtype == "bf16" else FP32


def _times(candidate: Candidate) -> tuple[int, int]:
    """Return the number of times in a step that a unit is gathered, and that its gradients are reduced.

    A pipeline reduces once, after the last backward pass of a stage, and leaves parameters that a backward pass has
    gathered for the next forward pass.
    """
    plan = candidate.plan
    m = plan.microbatches
    if candidate.mesh.pp > 1:
        return (m + 1 if plan.zero_stage == 3 else 1), 1
    if plan.zero_stage == 3:
        return 2 * m, m
    return 1, m if plan.zero_stage == 2 else 1


# ---------------------------------------------------------------- tensor parallelism


def _tensor(model: ModelShape, candidate: Candidate, rank: int) -> Iterator[Traffic]:
    plan, mesh = candidate.plan, candidate.mesh
    t, m = mesh.tp, plan.microbatches
    if t == 1:
        return
    cut = stages(model, plan.num_stages)
    own = [cut[stage] for stage in stages_of(plan, coordinates(mesh, rank)["pp"])]
    blocks = sum(stage.num_blocks for stage in own)
    embeddings, heads = sum(s.has_embedding for s in own), sum(s.has_head for s in own)
    whole = candidate.item_bytes * model.sequence * candidate.microbatch * model.hidden
    # an embedding reduces forward and, with the sequence sharded, gathers backward; a head the reverse
    calls = m * (4 * blocks + embeddings + heads)
    again = m * blocks if plan.recompute == "full" else 0  # without the last product, whose sum is not needed
    if plan.sequence_parallel:
        gathers, scatters = calls + 2 * again, calls + again
        yield Traffic("tp", GATHER, "activations", gathers, gathers * whole, t)
        yield Traffic("tp", SCATTER, "activations", scatters, scatters * whole, t)
        yield _norm_gradients(model, candidate, own)
    else:
        yield Traffic("tp", REDUCE, "activations", calls + again, (calls + again) * whole, t)
    if heads and plan.loss_parallel:  # the largest logit, the sum of exponentials, and the logit of the target
        tokens = FP32 * model.sequence * candidate.microbatch
        yield Traffic("tp", REDUCE, "loss", 3 * m, 3 * m * tokens, t)
    elif heads:
        logits = candidate.item_bytes * model.sequence * candidate.microbatch * model.vocab
        yield Traffic("tp", GATHER, "logits", m, m * logits, t)


def _norm_gradients(model: ModelShape, candidate: Candidate, own: list[Stage]) -> Traffic:
    """Return the traffic of the gradients of replicated weights: each rank has the part from its part of the sequence.

    `fully_shard` sums them when it reduces gradients: in each backward pass in the dtype of the products, or once after
    the last one, until which they wait in the dtype of the reduction. Without it the step sums them in one call.
    """
    plan, t = candidate.plan, candidate.mesh.tp
    vectors = sum(weight.size for stage in own for weight in _whole_weights(model, stage))
    calls = sum(1 for stage in own for _ in _whole_weights(model, stage))
    if not plan.is_sharded:
        return Traffic("tp", REDUCE, "gradients", 1, FP32 * vectors, t)
    times, item = (1, gradient_bytes(plan)) if reduces_late(candidate) else (plan.microbatches, candidate.item_bytes)
    return Traffic("tp", REDUCE, "gradients", times * calls, times * item * vectors, t)


def _whole_weights(model: ModelShape, stage: Stage) -> Iterator[Weight]:
    for weight in (*model.block() * stage.num_blocks, *stage.ends):
        if weight.cut is None:
            yield weight


# ---------------------------------------------------------------- pipeline


def _pipeline(model: ModelShape, candidate: Candidate, rank: int) -> Iterator[Traffic]:
    plan, mesh = candidate.plan, candidate.mesh
    if mesh.pp == 1:
        return
    at = coordinates(mesh, rank)
    own = stages_of(plan, at["pp"])
    ahead = sum(stage + 1 < plan.num_stages and stage + 1 not in own for stage in own)
    back = sum(stage > 0 and stage - 1 not in own for stage in own)
    size = block_input(model, candidate)
    for what, boundaries in (("activations", ahead), ("gradients", back)):
        calls = plan.microbatches * boundaries
        yield Traffic("pp", SEND, what, calls, calls * size, mesh.pp, "other micro-batches", 1.0)
    ends = {0, plan.num_stages - 1}
    if model.tied and len(ends.intersection(own)) == 1:
        local = chunk(model.vocab // mesh.tp, mesh.dp_shard, at["dp_shard"]) * model.hidden
        yield Traffic("pp", REDUCE, "tied table", 1, FP32 * local, 2)
