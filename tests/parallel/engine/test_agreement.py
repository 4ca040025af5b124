"""Ranks that call different modules train as one process does, in every step, or are refused before the step."""

from typing import Any

import pytest

from atoll.parallel.engine import agreement
from atoll.parallel.engine.forked import RankFailed
from atoll.parallel.engine.plan import Plan
from tests.parallel.engine import routed
from tests.parallel.engine.cases import plan
from tests.parallel.forked import run_ranks
from tests.parallel.ranks import call_on_ranks
from tests.turns import table

PLANS: dict[str, dict[str, Any]] = {
    "ddp 2": {"dp_replicate": 2},
    "ddp 2, accumulate 2": {"dp_replicate": 2, "accumulate": 2},
    "zero-1 2": {"dp_shard": 2, "zero": 1},
    "zero-1 2, accumulate 2": {"dp_shard": 2, "zero": 1, "accumulate": 2},
    "zero-2 2": {"dp_shard": 2, "zero": 2},
    "zero-2 2, accumulate 2": {"dp_shard": 2, "zero": 2, "accumulate": 2},
    "zero-3 2": {"dp_shard": 2, "zero": 3},
    "zero-3 2, accumulate 2": {"dp_shard": 2, "zero": 3, "accumulate": 2},
    "zero-3 2, recomputed": {"dp_shard": 2, "zero": 3, "recompute": "full"},
    "zero-3 4": {"dp_shard": 4, "zero": 3},
    "hsdp 2x2": {"dp_replicate": 2, "dp_shard": 2, "zero": 3},
}


def check(model: str, plan: Plan, optimizer: str = "sgd", *, tolerance: float = 5e-6) -> None:
    """Compare all losses, norms and parameters with the plain loop's."""
    right = routed.expected(model, optimizer, 0.7)
    for trace in call_on_ranks(routed.train, plan.mesh.size, model, plan, optimizer, 0.7):
        assert trace.losses == pytest.approx(right.losses, abs=tolerance)
        assert trace.norms == pytest.approx(right.norms, rel=20 * tolerance)
        for name, value in trace.parameters.items():
            assert (value - right.parameters[name]).abs().max().item() <= tolerance, name


@pytest.mark.parametrize(("name", "model"), table(PLANS, ["experts", "layers", "backwards"], days=3))
def test_ranks_that_call_different_modules_train_as_one_process(name: str, model: str) -> None:
    check(model, plan(**PLANS[name]))


@pytest.mark.parametrize("name", ["ddp 2", "zero-1 2, accumulate 2", "zero-3 2"])
def test_a_parameter_that_no_rank_has_used_is_left_alone(name: str) -> None:
    """AdamW would move it by its moments and shrink it by its weight decay."""
    check("experts", plan(**PLANS[name]), "adamw")


@pytest.mark.parametrize(("name", "model"), table(PLANS, ["again", "turns"], days=2))
def test_layers_that_ranks_call_more_or_less_often_train_as_in_one_process(name: str, model: str) -> None:
    check(model, plan(**PLANS[name]))


def train_without_trial(model: str, plan: Plan, optimizer: str) -> None:
    """Train on this rank as after the passes in which second calls are expected."""
    agreement.TRIAL_PASSES = 0
    routed.train(model, plan, optimizer)


def test_a_second_call_that_the_first_passes_gave_no_sign_of_is_refused() -> None:
    with pytest.raises(RankFailed, match=r"experts.0 was called twice in a pass, .* set plan.zero = 2, or 1"):
        run_ranks(train_without_trial, 2, "again", plan(dp_shard=2, zero=3), "sgd")


@pytest.mark.parametrize(
    "settings",
    [{"dp_replicate": 2}, {"dp_shard": 2, "zero": 1}, {"dp_shard": 2, "zero": 2}, {"dp_shard": 2, "zero": 3}],
    ids=["ddp", "zero-1", "zero-2", "zero-3"],
)
def test_experts_within_the_stages_of_a_pipeline_train_as_in_one_process(settings: dict[str, int]) -> None:
    check("layers", plan(pp=2, schedule="1f1b", **settings))


@pytest.mark.parametrize("stage", [1, 2])
def test_experts_within_stages_whose_backward_pass_is_split_train_as_in_one_process(stage: int) -> None:
    check("layers", plan(pp=2, schedule="interleaved-zero-bubble", dp_shard=2, zero=stage))


@pytest.mark.parametrize("stage", [1, 2, 3])
def test_experts_in_bf16_train_nearly_as_in_float32(stage: int) -> None:
    check("experts", plan(dp_shard=2, zero=stage, accumulate=2, precision="bf16"), tolerance=0.05)
