"""Canary clients over the fold: below the claim when all is right, above it for each planted fault."""

import random
from pathlib import Path

import numpy as np
import pytest

from atoll.aggregation.noise.private_sum import PrivateSum
from atoll.protocol.privacy.one_run_audit import Found, best_of
from atoll.server.config.run import RunConfig
from atoll.server.folding.plan import PlannedNoise, Private
from atoll.simulations.audits.clients import DIFFERENCE, draw, scores_of_clients
from atoll.tensors.layout import Tensor, in_order

M = 1000
LAYOUT = in_order([Tensor("w", "F32", (20, 40)), Tensor("b", "F32", (20,)), Tensor("v", "F32", (12_000,))])


def found(folder: Path, z: float = 1.0, m: int = M, seed: int = 0) -> tuple[Found, float]:
    """Return what the audit finds, and the claim."""
    config = RunConfig.model_validate(
        {
            "task": "t:t",
            "rounds": 1,
            "round": {"cohort_size": m},
            "aggregation": {"weighting": "uniform"},
            "privacy": {"epsilon": 50.0, "delta": 1e-5, "clip_norm": 0.5, "noise_multiplier": z},
        }
    )
    is_in = draw(m, random.Random(seed))
    rules = config.rules.privacy
    assert rules is not None
    best = best_of(scores_of_clients(config, LAYOUT, is_in, folder), is_in, rules.delta)
    return best, rules.epsilon_of(rules.cost)


@pytest.mark.slow
def test_it_stays_below_a_right_claim(tmp_path: Path) -> None:
    best, claim = found(tmp_path)
    assert claim == pytest.approx(4.3774, abs=1e-3)
    assert 0.9 < best.bound < 2.4, "it finds something, and no more than there is"


def _without_clipping(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Private, "clip_factors", lambda self, norms, *_: [1.0] * len(norms))


def _one_draw_for_all(monkeypatch: pytest.MonkeyPatch) -> None:
    right = PrivateSum.noise
    monkeypatch.setattr(
        PrivateSum,
        "noise",
        lambda self, _tensor, _count, start, stop: np.repeat(right(self, "w", 1, 0, 1), stop - start),
    )


def _same_noise_twice(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(
        Private,
        "planned",
        lambda self, _effect, _base, _layout: PlannedNoise(
            self.rules.noise_multiplier * self.rules.clip_norm, self.cohort_size, bytes(32).hex()
        ),
    )


@pytest.mark.slow
@pytest.mark.parametrize("plant", [_without_clipping, _one_draw_for_all, _same_noise_twice])
def test_it_finds_each_planted_fault(plant, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    plant(monkeypatch)
    best, claim = found(tmp_path)
    assert best.bound > claim
    assert (best.score == DIFFERENCE) is (plant is _same_noise_twice)


@pytest.mark.long
@pytest.mark.parametrize("share", [1.0, 0.5])
def test_ten_thousand_canaries_find_half_of_the_noise(
    share: float, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    right = PrivateSum.noise
    monkeypatch.setattr(PrivateSum, "noise", lambda self, *where: np.rint(share * right(self, *where)).astype(np.int64))
    best, claim = found(tmp_path, z=2.0, m=10_000)
    assert claim == pytest.approx(1.9931, abs=1e-3)
    assert (best.bound > claim) is (share < 1.0), best
