"""The plan of a private sum: what bounds each update, by what the sum is divided, and to what its noise is bound."""

import math
from dataclasses import replace
from pathlib import Path

import pytest

from atoll.protocol.privacy.correlated import inverse_square_root, sensitivity
from atoll.protocol.vocabulary import ClientId, Digest, RoundId, Version
from atoll.server.config.run import RunConfig
from atoll.server.files.run_store import RunStore
from atoll.server.folding.plan import FoldPlan, Private
from atoll.server.folding.reducer import step_of
from atoll.server.rounds.events import Aggregate, Contribution, NoiseRow, set_digest
from atoll.tensors.layout import Tensor
from tests.server.folding.test_plan import planned
from tests.server.rounds.test_correlated import correlated
from tests.server.rounds.test_privacy import rules

PRIVATE = Private(rules(), 8, b"k" * 32)
LAYOUT = [Tensor("w", "F32", (7, 3)), Tensor("b", "F32", (3,))]


def aggregate(digests: str, round_id: int = 3) -> Aggregate:
    contributions = (Contribution(ClientId(d), Digest(d), 10, 1.0) for d in digests)
    return Aggregate(RoundId(round_id), Version(2), tuple(contributions))


def test_the_noise_is_bound_to_the_set_of_updates_the_round_and_the_base() -> None:
    same = PRIVATE.planned(aggregate("abc"), Digest("base"), LAYOUT)
    assert PRIVATE.planned(aggregate("abc"), Digest("base"), LAYOUT) == same
    assert PRIVATE.planned(aggregate("cab"), Digest("base"), LAYOUT) == same, "a set has no order"
    others = [
        PRIVATE.planned(aggregate("ab"), Digest("base"), LAYOUT),
        PRIVATE.planned(aggregate("abd"), Digest("base"), LAYOUT),
        PRIVATE.planned(aggregate("abc", 4), Digest("base"), LAYOUT),
        PRIVATE.planned(aggregate("abc"), Digest("another"), LAYOUT),
        Private(PRIVATE.rules, 8, b"l" * 32).planned(aggregate("abc"), Digest("base"), LAYOUT),
    ]
    assert len({plan.key for plan in (same, *others)}) == 6


def test_the_sum_is_divided_by_the_cohort_size_however_many_updates_came() -> None:
    for digests in ("a", "abc", "abcdefgh"):
        planned = PRIVATE.planned(aggregate(digests), Digest("base"), LAYOUT)
        assert planned.divisor == 8
        assert planned.deviation == PRIVATE.rules.noise_multiplier * PRIVATE.rules.clip_norm


def test_the_plan_of_a_private_run_has_the_noise_and_hands_it_to_every_rank(tmp_path: Path) -> None:
    it = planned(tmp_path, private=PRIVATE, weighting="uniform")
    plan = FoldPlan.decode(it.plan.encode())
    assert plan.noise is not None
    assert plan.noise.deviation == PRIVATE.rules.noise_multiplier * PRIVATE.rules.clip_norm
    step = step_of(plan, it.base.layout, it.method, RunStore(tmp_path))
    assert step.private is not None
    assert max(update.factor for update in plan.updates) <= 1.0
    assert min(update.factor for update in plan.updates) < 1e-20, "the update of 1e30 is clipped"
    assert planned(tmp_path, weighting="uniform").plan.noise is None


def test_no_update_is_longer_than_the_clip_norm_and_a_short_one_stays() -> None:
    norms = [0.0, 0.25, 1.0, 40.0]
    factors = PRIVATE.clip_factors(norms, LAYOUT)
    assert [*factors[:2]] == [1.0, 1.0]
    assert all(norm * factor <= PRIVATE.rules.clip_norm for norm, factor in zip(norms, factors, strict=True))
    assert math.isclose(norms[3] * factors[3], PRIVATE.rules.clip_norm, rel_tol=1e-6)


def test_earlier_noises_are_drawn_again_from_their_rounds_bases_and_sets() -> None:
    """The noise of a version is the same in its own plan and in those of later ones, which take parts of it off."""
    private = Private(correlated(rounds=6, apart=2, bands=3), 8, b"k" * 32)
    rows: tuple[NoiseRow, ...] = ()
    own: list[str] = []
    for number, base in enumerate(("v0", "v1", "v2", "v3"), start=1):
        effect = replace(aggregate("abc"[: 1 + number % 3], number), earlier=rows)
        planned = private.planned(effect, Digest(base), LAYOUT)
        assert [key for key, _ in planned.earlier] == own[:2]
        assert [factor for _, factor in planned.earlier] == [-0.5, -0.125][: len(own)]
        own = [planned.key, *own]
        row = NoiseRow(effect.round_id, Digest(base), set_digest(c.digest for c in effect.contributions))
        rows = (row, *rows)[:2]
    assert len(set(own)) == 4
    assert FoldPlan.decode(replace(planned_of_none(), noise=planned).encode()).noise == planned


def planned_of_none() -> FoldPlan:
    config = RunConfig(task="m:t")
    settings = config.aggregation, config.optimizer
    return FoldPlan(Version(0), Digest("v0"), (), {}, {}, 1.0, None, (), *settings)


def test_the_noise_of_correlated_rounds_is_that_of_their_sensitivity_and_of_rounding() -> None:
    of_run = correlated(rounds=6, apart=2, bands=3)
    scale = sensitivity(inverse_square_root(3), 6, 2, 3)
    deviation = Private(of_run, 8, b"k" * 32).planned(aggregate("abc"), Digest("v0"), LAYOUT).deviation
    assert deviation == pytest.approx(of_run.noise_multiplier * scale, rel=1e-6)
    assert deviation > of_run.noise_multiplier * scale
