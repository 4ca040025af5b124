from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from atoll.parallel.engine.mesh import Mesh
from atoll.parallel.engine.plan import Plan
from atoll.parallel.planner.candidate import Candidate
from atoll.parallel.planner.memory import block_activations, memory, worst
from atoll.parallel.planner.shape import MODELS, ModelShape

GPT = ModelShape(layers=4, hidden=1536, heads=24, vocab=50304, sequence=1024, mlp="gelu", norm="layernorm")
LLAMA = replace(MODELS["llama-8b"], layers=8)

powers = st.sampled_from([1, 2, 4, 8])


@pytest.mark.parametrize(
    ("tp", "sequence_parallel", "precision", "per_place"),
    [(1, True, "bf16", 32), (4, False, "bf16", 8 + 24 / 4), (4, True, "bf16", 4 + 28 / 4), (1, True, "fp32", 64)],
)
def test_a_block_keeps_what_was_measured_of_it(
    tp: int, sequence_parallel: bool, precision: str, per_place: float
) -> None:
    """Bytes / (s b h), from saved-tensor hooks: 32.07, 14.02, 11.02 and 64.08, and their forms."""
    plan = Plan(mesh=Mesh(tp=tp), sequence_parallel=sequence_parallel, precision=precision)
    found = block_activations(GPT, Candidate(plan=plan, microbatch=3))
    assert found / (1024 * 3 * 1536) == per_place


def test_full_recomputation_keeps_two_bytes_a_place_and_one_block() -> None:
    plans = [Plan(precision="bf16", recompute=kind) for kind in ("none", "full")]
    none, full = (memory(GPT, Candidate(plan=plan)).activations for plan in plans)
    assert none == 4 * 32 * 1024 * 1536
    assert full == 4 * 2 * 1024 * 1536 + 32 * 1024 * 1536


def test_selective_recomputation_keeps_the_results_of_products_and_attention() -> None:
    """Input, q, k, v, attention, output and down of width h, up of 4 h: 22 bytes a place, and 32 of one block."""
    found = memory(GPT, Candidate(plan=Plan(precision="bf16", recompute="selective"))).activations
    assert found == (3 * 22 + 32) * 1024 * 1536


@given(powers, powers, st.sampled_from([1, 2, 3]))
def test_the_state_falls_with_shards_and_with_tensor_ranks(d: int, t: int, zero: int) -> None:
    def states(d: int, t: int) -> float:
        return worst(LLAMA, Candidate(plan=Plan(mesh=Mesh(dp_shard=d, tp=t), zero=zero))).states

    assert states(2 * d, t) < states(d, t) > states(d, 2 * t)
    assert states(d, t) >= 16 * LLAMA.parameters / (d * t)  # norms are whole on every tensor rank


@given(powers, powers, st.integers(1, 4))
def test_memory_falls_with_shards_and_rises_with_the_micro_batch(d: int, t: int, b: int) -> None:
    def total(d: int, t: int, b: int) -> float:
        plan = Plan(mesh=Mesh(dp_shard=d, tp=t), zero=3, precision="bf16", loss_parallel=t > 1)
        return worst(LLAMA, Candidate(plan=plan, microbatch=b)).total

    assert total(2 * d, t, b) < total(d, t, b) > total(d, 2 * t, b)
    assert total(d, t, b + 1) > total(d, t, b)


@given(st.integers(2, 8), st.integers(1, 4))
def test_1f1b_never_needs_more_than_gpipe(p: int, rounds: int) -> None:
    def total(schedule: str) -> float:
        plan = Plan(mesh=Mesh(pp=p), schedule=schedule, num_microbatches=p * rounds)
        return worst(LLAMA, Candidate(plan=plan)).total

    assert total("1f1b") <= total("gpipe")


def test_zero_3_gathers_two_blocks_where_zero_2_gathers_the_stage() -> None:
    found = {}
    for zero in (2, 3):
        plan = Plan(mesh=Mesh(dp_shard=64), zero=zero, precision="bf16")
        found[zero] = memory(MODELS["llama-8b"], Candidate(plan=plan)).transient
    block, ends = 218_112_000, 2 * 128256 * 4096 + 4096  # parameters of Llama 3.1 8B
    assert found[2] - found[3] == pytest.approx(2 * 30 * block)
    assert found[3] == pytest.approx(2 * (2 * block + ends) + 6 * ends, rel=1e-3)


@given(st.integers(1, 40), st.sampled_from([1, 2, 4]), st.sampled_from([1, 2]))
def test_all_ranks_together_hold_each_element_once(d: int, t: int, p: int) -> None:
    shape = ModelShape(layers=3, hidden=24, heads=4, ffn=20, vocab=36, sequence=8)
    plan = Plan(mesh=Mesh(pp=p, dp_shard=d, tp=t), zero=3, sequence_parallel=False)
    held = sum(memory(shape, Candidate(plan=plan), rank).parameters for rank in range(p * d * t)) / 4
    repeated = (t - 1) * (2 * shape.layers + 1) * shape.hidden  # the norms
    assert held == shape.parameters + repeated


@pytest.mark.parametrize(("optimizer", "per_parameter"), [("sgd", 0), ("momentum", 4), ("novograd", 4), ("adamw", 8)])
def test_an_optimizer_has_its_moments(optimizer: str, per_parameter: int) -> None:
    found = memory(GPT, Candidate(optimizer=optimizer)).optimizer
    assert found == pytest.approx(per_parameter * GPT.parameters, rel=1e-5)


def test_a_candidate_names_what_it_cannot_be() -> None:
    with pytest.raises(ValueError, match="microbatch: must be a whole number >= 1, got 0"):
        Candidate(microbatch=0)
    with pytest.raises(ValueError, match=r"optimizer: must be one of sgd, .*, got 'adamax'"):
        Candidate(optimizer="adamax")
