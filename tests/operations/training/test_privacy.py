"""The noise that keeps a budget, in few evaluations of the accountant; the most steps that it allows."""

import pytest

from atoll.operations.training import privacy
from atoll.parallel.trainer.config import TrainConfig
from atoll.protocol.privacy import gaussian, loss_distribution, subsampled
from atoll.task.local import Local
from atoll.training.private.config import PrivacyConfig


def tight(q: float, z: float, steps: int, delta: float, _about: float = 0.0) -> float:
    """Stand in for the library's accountant, whose epsilon is some tenth below the bound's."""
    return 0.9 * subsampled.epsilon_bound(q, z, steps, delta)


@pytest.mark.parametrize("epsilon", [0.3, 1.0, 8.0, 40.0])
def test_the_least_noise_is_found_in_few_evaluations(monkeypatch: pytest.MonkeyPatch, epsilon: float) -> None:
    calls = []
    monkeypatch.setattr(loss_distribution, "is_installed", lambda: True)
    monkeypatch.setattr(loss_distribution, "epsilon_of", lambda *given: (calls.append(given), tight(*given))[1])
    config = PrivacyConfig(unit="example", sample_rate=0.04, clip_norm=1.0, epsilon=epsilon, delta=1e-5)
    found = privacy.terms_of(config, TrainConfig(epochs=8), Local())
    assert found is not None
    assert found.steps == 200
    assert 0.99 * epsilon < tight(0.04, found.noise_multiplier, 200, 1e-5) <= epsilon
    assert len(calls) <= 10
    before = len(calls)
    assert found.allowed(200) == 200
    assert len(calls) == before
    most = found.allowed(300)
    assert 200 <= most < 204
    assert tight(0.04, found.noise_multiplier, most, 1e-5) <= epsilon


def test_a_rate_of_one_is_accounted_exactly() -> None:
    config = PrivacyConfig(unit="example", sample_rate=1.0, clip_norm=1.0, noise_multiplier=4.0, delta=1e-6)
    found = privacy.terms_of(config, TrainConfig(steps=50), Local())
    assert found is not None
    assert found.guarantee(50)["epsilon"] == pytest.approx(9.482192, abs=1e-5)  # dp-accounting
    assert found.guarantee(50)["epsilon"] == gaussian.epsilon_of(gaussian.mu_of([(4.0, 50)]), 1e-6)
    assert found.allowed(10**6) == 10**6  # there is no budget


def test_without_a_unit_there_are_no_terms() -> None:
    assert privacy.terms_of(PrivacyConfig(), TrainConfig(), Local()) is None


def test_steps_follow_from_epochs_and_the_rate() -> None:
    noised = PrivacyConfig(unit="example", sample_rate=0.1, clip_norm=1.0, noise_multiplier=1.0, delta=1e-6)
    for config, local, steps in (
        (TrainConfig(steps=7, epochs=2), Local(), 7),
        (TrainConfig(epochs=2), Local(), 20),
        (TrainConfig(), Local(epochs=3), 30),
        (TrainConfig(), Local(epochs=3, max_steps=12), 12),
    ):
        found = privacy.terms_of(noised, config, local)
        assert found is not None
        assert found.steps == steps
