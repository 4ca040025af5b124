"""The memory of one rank at the worst moment of a step, by term [bytes].

Legend: s tokens and b sequences of a micro-batch, m micro-batches, h hidden, kv width of keys, f width of the MLP, v
vocabulary, t degree of tp (t' if the sequence is sharded too, else 1), w bytes of an activation, local: elements of the
rank's shards, gathered: of the same units on all shards together.

    parameters    4 local                         fp32: the master weights
    gradients     4 local
    optimizer     4 moments x local + 4 for each tensor's step counter
    transient     w x gathered: of all of the stage below ZeRO-3, of two blocks and the rest of the stage with it;
                  gradients in transit: of one unit, or, if they accumulate unreduced, 4 gathered in place of 4 local;
                  a pipeline's receive buffers: w s b h / t' for each micro-batch and neighbour; under tp an embedding's
                  gradient is whole until it is summed: while it accumulates unreduced, 4 v h in place of 4 v h / t
    activations   of one block and micro-batch w s b (2 h / t' + 2 h + (j h + 2 kv + k f) / t), with gelu j = 2 and
                  k = 2, with swiglu j = 3 (heads are joined in a copy) and k = 4; with full recomputation w s b h / t',
                  with selective w s b (h / t' + 2 h + (2 h + 2 kv + k / 2 f) / t), under tp w s b (2 h + 2 h / t') more
                  for the collectives' results, and once the above; times the blocks and the micro-batches in flight
    work          the larger of the logits, their fp32 copy and its gradient, s b v (w + 4 + 4) / t under loss parallel,
                  of the gradients inside one block, w s b (2 h + (k + 2) / 2 f / t), and of one micro-batch's whole
                  gradient of an embedding under tp, w v h

With kv = h, f = 4 h and gelu a block has 32 s b h bytes in 16 bits, s b h (4 + 28 / t) under tensor and sequence
parallelism: PyTorch's activations with flash attention and without dropout (measured; Megatron-LM gathers again and
stores (34 s b h) / t: Korthikanti et al., "Reducing Activation Recomputation in Large Transformer Models", 2022, table
2). The terms of the state are exact; the others are estimates, which a dry run measures.
"""

from dataclasses import dataclass, fields, replace

from atoll.parallel.engine.plan import SPLIT
from atoll.parallel.planner import accounting
from atoll.parallel.planner.accounting import ACCOUNTINGS
from atoll.parallel.planner.candidate import MOMENTS, Candidate, coordinates, stages, stages_of
from atoll.parallel.planner.shape import ModelShape
from atoll.parallel.planner.units import Share, share

FP32 = 4

BETWEEN_HALVES = 1.5
"""Factor of the activations between the halves of a split backward pass, with the gradients of every product (measured
in dry runs: 1.3 to 1.6)."""


@dataclass(frozen=True, slots=True)
class Memory:
    """The memory of one rank, by term [bytes]."""

    parameters: float
    """The rank's shards of the weights."""
    gradients: float
    """The gradients of its shards."""
    optimizer: float
    """The moments and step counters of its shards."""
    transient: float = 0
    """Weights that are gathered for a while, gradients in transit, a pipeline's buffers."""
    activations: float = 0
    """Activations that forward passes store for backward passes."""
    work: float = 0
    """Results that are used and freed at once: logits, gradients inside a block."""

    @property
    def states(self) -> float:
        """The memory that stays from step to step: parameters, gradients, optimizer."""
        return self.parameters + self.gradients + self.optimizer

    @property
    def total(self) -> float:
        """The memory of a rank: the sum of all terms [bytes]."""
        return float(sum(getattr(self, field.name) for field in fields(self)))


def memory(model: ModelShape, candidate: Candidate, rank: int = 0, *, counted: str = "engine") -> Memory:
    """Return the memory of a rank.

    Args:
        model: the shape of the model.
        candidate: the plan and its sizes.
        rank: the number of the rank in the mesh.
        counted: `engine`, the real memory of this engine; or a convention of `accounting` by its name.
    """
    if counted != "engine":
        return _by_convention(model, candidate, counted)
    at = coordinates(candidate.mesh, rank)
    known = without_activations(share(model, candidate, rank), candidate)
    return replace(
        known,
        transient=known.transient + _buffers(model, candidate, at["pp"]) + _waiting_words(model, candidate, at["pp"]),
        activations=_activations(model, candidate, at["pp"]),
        work=max(
            _logits(model, candidate, at["pp"]),
            _block_gradients(model, candidate),
            _words_gradient(model, candidate, at["pp"]),
        ),
    )


def without_activations(part: Share, candidate: Candidate) -> Memory:
    """Return the memory of a rank from the sizes of its part (`Share`) of a model whose activations are unknown."""
    moments = MOMENTS[candidate.optimizer]
    return Memory(
        parameters=FP32 * part.local,
        gradients=FP32 * part.local,
        optimizer=FP32 * moments * part.local + (FP32 * part.num_tensors if moments > 1 else 0),
        transient=_transient(part, candidate),
    )


def worst(model: ModelShape, candidate: Candidate, *, counted: str = "engine") -> Memory:
    """Return the memory of the rank that needs most: the first of its data and tensor groups, on one of the stages."""
    step = candidate.mesh.size // candidate.mesh.pp
    ranks = range(0, candidate.mesh.size, step)
    return max((memory(model, candidate, rank, counted=counted) for rank in ranks), key=lambda found: found.total)


def _by_convention(model: ModelShape, candidate: Candidate, counted: str) -> Memory:
    plan, mesh = candidate.plan, candidate.mesh
    part = (model.nominal or model.parameters) / (mesh.pp * mesh.tp)
    states = accounting.states(part, ACCOUNTINGS[counted], zero=plan.zero_stage, num_ranks=mesh.dp_shard)
    stored = accounting.activations(model, candidate.microbatch) / (mesh.pp * mesh.tp)
    return Memory(states[0], states[1], states[2], activations=stored * in_flight(candidate, 0))


def _transient(part: Share, candidate: Candidate) -> float:
    plan = candidate.plan
    if not plan.is_sharded:
        return 2 * part.whole if plan.precision == "bf16" else 0  # autocast caches the cast weights
    weights = candidate.item_bytes * (part.in_turn if plan.zero_stage == 3 else part.gathered)
    if reduces_late(candidate):
        return weights + FP32 * (part.gathered - part.local)
    return weights + (candidate.item_bytes + FP32) * part.largest


def reduces_late(candidate: Candidate) -> bool:
    """Return whether gradients accumulate over several micro-batches before they are summed over the ranks."""
    plan = candidate.plan
    return plan.microbatches > 1 and (plan.zero_stage < 2 or candidate.mesh.pp > 1)


def _buffers(model: ModelShape, candidate: Candidate, pp_rank: int) -> float:
    local = stages_of(candidate.plan, pp_rank)
    neighbours = {stage + step for stage in local for step in (-1, 1)} & set(range(candidate.plan.num_stages))
    return len(neighbours - set(local)) * candidate.plan.microbatches * block_input(model, candidate)


def _whole_words(model: ModelShape, candidate: Candidate, pp_rank: int) -> int:
    """Return the elements of the embedding's gradient, which torch makes whole on each rank of a tensor group.

    0: no tp, or another stage has the embedding.
    """
    cut, local = stages(model, candidate.plan.num_stages), stages_of(candidate.plan, pp_rank)
    is_whole = candidate.mesh.tp > 1 and any(cut[stage].has_embedding for stage in local)
    return model.vocab * model.hidden if is_whole else 0


def _waiting_words(model: ModelShape, candidate: Candidate, pp_rank: int) -> float:
    """Return the bytes that the embedding's gradient has beyond the rank's part of it while it accumulates."""
    plan = candidate.plan
    waits = reduces_late(candidate) or (plan.microbatches > 1 and not plan.is_sharded)
    whole = _whole_words(model, candidate, pp_rank)
    return FP32 * (whole - whole / candidate.mesh.tp) if waits else 0


def _words_gradient(model: ModelShape, candidate: Candidate, pp_rank: int) -> float:
    """Return the bytes of the embedding's gradient of one micro-batch."""
    item_bytes = candidate.item_bytes if candidate.plan.is_sharded else FP32  # autocast leaves a lookup in float32
    return item_bytes * _whole_words(model, candidate, pp_rank)


def block_activations(model: ModelShape, candidate: Candidate) -> float:
    """Return the bytes that one block stores of one micro-batch without recomputation."""
    h, t = model.hidden, candidate.mesh.tp
    kv = model.num_kv_heads * model.head_size
    is_gpt = model.mlp == "gelu"
    products = (2 if is_gpt else 3) * h + 2 * kv + (2 if is_gpt else 4) * model.width
    elements = 2 * h / candidate.cut_tokens + 2 * h + products / t
    return candidate.item_bytes * model.sequence * candidate.microbatch * elements


def kept_activations(model: ModelShape, candidate: Candidate) -> float:
    """Return the bytes that one block stores of one micro-batch until its backward pass."""
    kind, t = candidate.plan.recompute, candidate.mesh.tp
    if kind == "none":
        return block_activations(model, candidate)
    if kind == "full":
        return block_input(model, candidate)
    h, kv = model.hidden, model.num_kv_heads * model.head_size
    products = 2 * h + 2 * kv + (1 if model.mlp == "gelu" else 2) * model.width
    elements = h / candidate.cut_tokens + 2 * h + products / t
    if t > 1:
        elements += 2 * h + (2 * h / t if candidate.plan.sequence_parallel else 0)
    return candidate.item_bytes * model.sequence * candidate.microbatch * elements


def block_input(model: ModelShape, candidate: Candidate) -> float:
    """Return the bytes of the input of a block, of one micro-batch."""
    return candidate.item_bytes * model.sequence * candidate.microbatch * model.hidden / candidate.cut_tokens


def _activations(model: ModelShape, candidate: Candidate, pp_rank: int) -> float:
    cut, local = stages(model, candidate.plan.num_stages), stages_of(candidate.plan, pp_rank)
    passes = in_flight(candidate, pp_rank)
    num_blocks = sum(cut[stage].num_blocks for stage in local) / len(local) * passes
    whole = block_activations(model, candidate)
    kept = kept_activations(model, candidate)
    stored = kept * num_blocks + (whole - kept if candidate.plan.recompute == "selective" else 0)
    if candidate.plan.recompute == "full":
        stored += whole
    if candidate.mesh.pp > 1 and candidate.plan.schedule in SPLIT:
        stored *= BETWEEN_HALVES
    if any(cut[stage].has_head for stage in local):  # the logits of one micro-batch are `work`
        stored += (-(-passes // len(local)) - 1) * _words(model, candidate) * (candidate.item_bytes + FP32)
    return stored


def _block_gradients(model: ModelShape, candidate: Candidate) -> float:
    inside = (2 if model.mlp == "gelu" else 3) * model.width / candidate.mesh.tp
    return candidate.item_bytes * model.sequence * candidate.microbatch * (2 * model.hidden + inside)


def _logits(model: ModelShape, candidate: Candidate, pp_rank: int) -> float:
    if candidate.plan.num_stages - 1 not in stages_of(candidate.plan, pp_rank):
        return 0
    # The log-softmax, its gradient and that of its input. With one micro-batch the gradients of the step, which are
    # counted beside them, are still to come.
    in_fp32 = 3 if candidate.plan.microbatches > 1 else 2
    return _words(model, candidate) * (candidate.item_bytes + in_fp32 * FP32)


def _words(model: ModelShape, candidate: Candidate) -> float:
    """Return the number of logits of one micro-batch."""
    cut = candidate.mesh.tp if candidate.plan.loss_parallel else 1
    return model.sequence * candidate.microbatch * model.vocab / cut


def in_flight(candidate: Candidate, pp_rank: int) -> int:
    """Return the largest number of forward passes of a rank that wait for their backward pass (1 without a pipeline).

    GPipe: all of the m V. 1F1B: p - rank. Interleaved 1F1B: (V - 1) p + 2 (p - 1 - rank) + 1. Zero-bubble: V p.
    DualPipeV: 2 p + 1.
    """
    plan, p = candidate.plan, candidate.mesh.pp
    if p == 1:
        return 1
    most = {
        "1f1b": p - pp_rank,
        "interleaved-1f1b": (plan.stages - 1) * p + 2 * (p - 1 - pp_rank) + 1,
        "interleaved-zero-bubble": plan.num_stages,
        "zbv-zero-bubble": plan.num_stages,
        "dualpipe-v": plan.num_stages + 1,
    }
    passes = plan.microbatches * plan.stages
    return min(passes, most.get(plan.schedule, passes))
