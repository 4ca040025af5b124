"""The engine itself on tensors without memory, against the formulas; `make test-parallel` has more random cases."""

from dataclasses import replace

import pytest
import torch

from atoll.parallel.engine.forked import RankFailed
from atoll.parallel.engine.mesh import Mesh
from atoll.parallel.engine.plan import Plan
from atoll.parallel.planner.candidate import Candidate, stages
from atoll.parallel.planner.counting import Watch
from atoll.parallel.planner.dry_run import apart
from atoll.parallel.planner.memory import memory
from atoll.parallel.planner.shape import ModelShape
from tests.parallel.planner.dry_runs import case, differences

SMALL = ModelShape(layers=4, hidden=64, heads=4, ffn=96, vocab=128, sequence=32)


@pytest.mark.parametrize(
    "seed", [4, 17, *(pytest.param(seed, marks=pytest.mark.long) for seed in (6, 10, 13, 16, 25, 34))]
)
def test_a_random_plan_holds_and_sends_exactly_what_is_predicted(seed: int) -> None:
    shape, candidate, rank = case(seed)
    assert differences(shape, candidate, apart(shape, candidate, rank)) == []


@pytest.mark.long
def test_a_rank_of_4_x_4_x_4_holds_and_sends_exactly_what_is_predicted() -> None:
    """Rank 21 of 64, a model of 0.6 B parameters with GPT's sizes, 8 micro-batches of one sequence of 1024, 1F1B."""
    shape = ModelShape(layers=16, hidden=1536, heads=24, ffn=4096, vocab=50304, sequence=1024)
    plan = Plan(mesh=Mesh(pp=4, dp_shard=4, tp=4), zero=3, num_microbatches=8)
    run = apart(shape, Candidate(plan=plan), 21)
    assert differences(shape, Candidate(plan=plan), run) == []
    calls, num_bytes = run.counted()["pp", "send"]
    assert (calls, num_bytes) == (16, 24 * 2**20)  # 8 forward and 8 back of s h / tp fp32 numbers
    assert run.peak == pytest.approx(memory(shape, Candidate(plan=plan), 21).total, rel=0.15)


def test_the_peak_of_a_plain_step_is_within_15_per_cent_of_the_prediction() -> None:
    shape = replace(SMALL, hidden=256, ffn=1024, sequence=256, vocab=512)
    deep = Plan(mesh=Mesh(dp_shard=4), recompute="selective")
    for plan in (Plan(accumulate=2), Plan(mesh=Mesh(dp_shard=4)), Plan(mesh=Mesh(tp=4)), Plan(mesh=Mesh(pp=2)), deep):
        candidate = Candidate(plan=plan, microbatch=4)
        assert apart(shape, candidate).peak == pytest.approx(memory(shape, candidate).total, rel=0.15)


@pytest.mark.parametrize(
    ("plan", "words", "rank"),
    [
        pytest.param(
            Plan(mesh=Mesh(pp=2, dp_shard=2, tp=4), num_microbatches=4, precision="bf16"), 2048, 0, id="first stage"
        ),
        pytest.param(
            Plan(mesh=Mesh(dp_shard=2, tp=4), zero=1, accumulate=2, precision="bf16"), 16384, 0, id="one stage"
        ),
        pytest.param(Plan(mesh=Mesh(tp=4), accumulate=2), 16384, 0, id="tp alone", marks=pytest.mark.long),
    ],
)
def test_the_peak_with_many_words_under_tp_is_within_15_per_cent_of_the_prediction(
    plan: Plan, words: int, rank: int
) -> None:
    """The embedding's gradient is whole on each rank of a tensor group while it accumulates."""
    shape, candidate = replace(SMALL, vocab=words), Candidate(plan=plan)
    assert apart(shape, candidate, rank).peak == pytest.approx(memory(shape, candidate, rank).total, rel=0.15)


@pytest.mark.parametrize("rank", [0, 4])
def test_a_stage_of_the_head_alone_is_as_predicted(rank: int) -> None:
    """The norm before it is cut along the sequence, and so is what the first stage sends."""
    plan = Plan(mesh=Mesh(pp=2, dp_shard=2, tp=2), num_microbatches=4)
    shape, candidate = replace(SMALL, vocab=4096), Candidate(plan=plan)
    assert [stage.num_blocks for stage in stages(shape, 2)] == [4, 0]
    assert differences(shape, candidate, apart(shape, candidate, rank)) == []


def test_what_can_be_hidden_is_told_from_what_is_waited_for() -> None:
    """Parameters are gathered ahead, gradients are reduced behind; activations of a cut product are needed at once."""
    run = apart(SMALL, Candidate(plan=Plan(mesh=Mesh(dp_shard=2, tp=2))))
    hidden = run.hidden()
    calls, can_be, _ = hidden["dp_shard", "reduce_scatter"]
    assert (calls, calls - can_be) == (5, 2)  # nothing is computed after the first block's and the embedding's
    calls, can_be, _ = hidden["dp_shard", "all_gather"]
    assert (calls, calls - can_be) == (10, 2)  # nothing is computed before the embedding and the first block
    assert hidden["tp", "reduce_scatter"] == (18, 0, 0.0)
    assert hidden["tp", "all_gather"][:2] == (19, 0)


def test_what_the_engine_refuses_is_refused() -> None:
    with pytest.raises(ValueError, match="tp=3 must divide heads=4"):
        apart(SMALL, Candidate(plan=Plan(mesh=Mesh(tp=3))))
    with pytest.raises(ValueError, match="DDP"):
        apart(SMALL, Candidate(plan=Plan(mesh=Mesh(dp_replicate=2))))


def test_a_dry_run_that_takes_too_long_is_ended() -> None:
    with pytest.raises(RankFailed, match=r"did not end within 0.01 s"):
        apart(SMALL, Candidate(), timeout_s=0.01)


def test_live_bytes_are_counted_and_given_back() -> None:
    watch = Watch(lambda _group: "")
    held = torch.zeros(1000)
    watch.hold(held)
    with watch:
        kept = held + 1
        for _ in range(5):
            held * 2
        assert watch.alive == 8000
        kept.untyped_storage().resize_(0)
        assert (held * 2).sum() == 0
    assert watch.peak == 12000
    assert watch.flops == 0
    with watch:
        torch.ones(2, 3) @ torch.ones(3, 4)
    assert watch.flops == 2 * 2 * 3 * 4
