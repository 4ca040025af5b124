"""Volumes of the literature, and those that were counted for a GPT of width 1536 in fp32 before this engine existed."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from atoll.parallel.engine.mesh import Mesh
from atoll.parallel.engine.plan import Plan
from atoll.parallel.planner.accounting import TRAFFIC
from atoll.parallel.planner.candidate import Candidate
from atoll.parallel.planner.shape import ModelShape
from atoll.parallel.planner.traffic import Traffic, totals, traffic

GPT = ModelShape(layers=4, hidden=1536, heads=24, vocab=50304, sequence=1024, mlp="gelu", norm="layernorm")
M = 4 * 267_807_744
MIB = 2**20


def counted(plan: Plan, rank: int = 0) -> dict[tuple[str, str], tuple[int, float]]:
    found = totals(GPT, Candidate(plan=plan), rank)
    return {key: (calls, round(num_bytes / MIB, 1)) for key, (calls, num_bytes) in found.items()}


def test_ddp_reduces_the_whole_gradient_once() -> None:
    (item,) = traffic(GPT, Candidate(plan=Plan(mesh=Mesh(dp_replicate=4))))
    assert (item.kind, item.payload, item.sent) == ("all_reduce", M, 2 * 3 / 4 * M)


@given(st.integers(2, 64), st.sampled_from([1, 2, 3]))
def test_zero_sends_1_and_1_and_1_5_times_what_ddp_sends(d: int, zero: int) -> None:
    def sent(plan: Plan) -> float:
        return sum(item.sent for item in traffic(GPT, Candidate(plan=plan)))

    ddp = sent(Plan(mesh=Mesh(dp_replicate=d)))
    assert sent(Plan(mesh=Mesh(dp_shard=d), zero=zero)) / ddp == pytest.approx(
        TRAFFIC[zero] / 2, rel=3e-2
    )  # shards are padded


def test_what_was_counted_of_fully_sharded_data_parallelism() -> None:
    assert counted(Plan(mesh=Mesh(dp_shard=4), zero=2)) == {
        ("dp_shard", "all_gather"): (5, 1021.6),
        ("dp_shard", "reduce_scatter"): (5, 1021.6),
    }
    assert counted(Plan(mesh=Mesh(dp_shard=4), zero=3)) == {
        ("dp_shard", "all_gather"): (10, 2043.2),
        ("dp_shard", "reduce_scatter"): (5, 1021.6),
    }
    assert counted(Plan(mesh=Mesh(dp_replicate=2, dp_shard=2)))["dp_replicate", "all_reduce"] == (5, 510.8)


def test_what_was_counted_of_tensor_parallelism() -> None:
    assert counted(Plan(mesh=Mesh(tp=4), sequence_parallel=False)) == {
        ("tp", "all_reduce"): (18, 108.0),
        ("tp", "all_gather"): (1, 4 * 49.1 + 0.1),  # the logits, of which each rank has a quarter
    }
    found = counted(Plan(mesh=Mesh(tp=4)))
    assert found["tp", "reduce_scatter"] == (18, 108.0)
    assert found["tp", "all_gather"] == (19, pytest.approx(108.0 + 4 * 49.1, abs=0.2))


def test_what_was_counted_of_rank_21_of_4_x_4_x_4() -> None:
    """1F1B, 8 micro-batches of one sequence: of each block 9 gathers of 27.02 MiB; 16 sends of 24 MiB in all."""
    deep = ModelShape(layers=16, hidden=1536, heads=24, vocab=50304, sequence=1024, mlp="gelu", norm="layernorm")
    plan = Plan(mesh=Mesh(pp=4, dp_shard=4, tp=4), zero=3, num_microbatches=8)
    found = totals(deep, Candidate(plan=plan), 21)
    blocks = found["dp_shard", "reduce_scatter"][0]
    assert found["dp_shard", "all_gather"] == (9 * blocks, pytest.approx(9 * blocks * 972.8 / 36 * MIB, rel=1e-3))
    assert found["dp_shard", "reduce_scatter"][1] == pytest.approx(blocks * 108.1 / 4 * MIB, rel=1e-3)
    assert found["tp", "all_gather"][0] == found["tp", "reduce_scatter"][0] == 128 / 4 * blocks
    assert found["pp", "send"] == found["pp", "receive"] == (16, 24 * MIB)


def test_recomputation_repeats_the_forward_but_not_its_last_sum() -> None:
    once = counted(Plan(mesh=Mesh(tp=4), sequence_parallel=False))["tp", "all_reduce"][0]
    again = counted(Plan(mesh=Mesh(tp=4), sequence_parallel=False, recompute="full"))["tp", "all_reduce"][0]
    assert again - once == GPT.layers


@given(st.sampled_from(["all_gather", "reduce_scatter", "all_reduce", "send"]), st.integers(2, 64))
def test_a_ring_is_at_most_once_or_twice_round(kind: str, ranks: int) -> None:
    item = Traffic("dp_shard", kind, "gradients", 3, 1000.0, ranks)
    times = 2 if kind == "all_reduce" else 1
    assert item.sent == (1000 if kind == "send" else pytest.approx(times * 1000 * (ranks - 1) / ranks))
    assert item.steps == 3 * (1 if kind == "send" else times * (ranks - 1))


def test_bfloat16_halves_what_is_gathered_and_gradients_stay_in_fp32_unless_told() -> None:
    def payloads(**options: str) -> list[float]:
        plan = Plan(mesh=Mesh(dp_shard=4), zero=3, precision="bf16", **options)  # type: ignore[arg-type]
        return [item.payload / M for item in traffic(GPT, Candidate(plan=plan))]

    assert payloads() == pytest.approx([2 * 0.5, 1.0], rel=1e-6)
    assert payloads(reduce_dtype="bf16") == pytest.approx([2 * 0.5, 0.5], rel=1e-6)


def test_a_tied_table_on_two_stages_is_added_up_between_them() -> None:
    tied = ModelShape(layers=4, hidden=64, heads=4, vocab=100, sequence=8, tied=True)
    candidate = Candidate(plan=Plan(mesh=Mesh(pp=4, tp=2)))
    assert totals(tied, candidate, 0)["pp", "all_reduce"] == (1, 4 * 100 * 64 // 2)
    assert ("pp", "all_reduce") not in totals(tied, candidate, 2)
