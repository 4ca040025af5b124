import math

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from atoll.training.optimizers.noise_scale import Estimate, NoiseScale, estimate


def test_the_estimate_of_a_known_pair() -> None:
    found = estimate(small_batch=32, small_squared=2.0, big_batch=512, big_squared=0.5)
    assert (found.signal, found.noise) == pytest.approx((0.4, 51.2))
    scale = NoiseScale()
    scale.add(found)
    assert scale.simple == pytest.approx(128.0)


@given(signal=st.floats(0, 1e3), noise=st.floats(0, 1e3), small=st.integers(1, 50), more=st.integers(1, 500))
def test_expected_norms_give_back_what_they_are_made_of(signal: float, noise: float, small: int, more: int) -> None:
    big = small + more
    found = estimate(
        small_batch=small,
        small_squared=signal + noise / small,
        big_batch=big,
        big_squared=signal + noise / big,
    )
    assert found.signal == pytest.approx(signal, abs=1e-6 * (1 + noise))
    assert found.noise == pytest.approx(noise, abs=1e-6 * big * (1 + signal + noise))


def test_drawn_gradients_give_the_noise_scale_of_their_covariance() -> None:
    """Gradients N(G, Σ) with tr Σ = 60 and |G|² = 0.5: B_simple = 120, from micro-batches of 4 in steps of 32."""
    rng = np.random.default_rng(7)
    deviations = np.sqrt(np.linspace(0.2, 5.8, 20))
    true = np.full(20, math.sqrt(0.5 / 20))
    scale, found = NoiseScale(decay=0.999), []
    for _ in range(4000):
        micro = (true + deviations * rng.standard_normal((8, 4, 20))).mean(axis=1)
        small, big = (micro**2).sum(axis=1).mean(), (micro.mean(axis=0) ** 2).sum()
        found.append(estimate(small_batch=4, small_squared=small, big_batch=32, big_squared=big))
        scale.add(found[-1])
    for kind, true_value in (("signal", 0.5), ("noise", 60.0)):
        values = np.array([getattr(one, kind) for one in found])
        assert abs(values.mean() - true_value) < 4 * values.std() / math.sqrt(len(values)), kind
    assert min(one.signal for one in found) < 0  # single estimates are; their mean is not
    assert scale.simple == pytest.approx(120, rel=0.15)
    ratios = np.array([one.noise / one.signal for one in found])
    assert abs(ratios.mean() - 120) > 30  # what averaging the ratios would say


def test_a_mean_that_is_not_positive_is_no_scale_until_it_is() -> None:
    scale = NoiseScale(decay=0.5)
    assert scale.simple is None
    assert scale.mean is None
    scale.add(Estimate(signal=-1.0, noise=10.0))
    assert scale.simple is None
    assert scale.mean == Estimate(-1.0, 10.0)
    scale.add(Estimate(signal=2.0, noise=10.0))
    assert scale.mean == Estimate(pytest.approx(1.0), pytest.approx(10.0))
    assert scale.simple == pytest.approx(10.0)


def test_the_first_estimates_count_in_full() -> None:
    scale = NoiseScale(decay=0.99)
    for signal in (1.0, 2.0, 3.0):
        scale.add(Estimate(signal, noise=1.0))
    weights = [0.99**2, 0.99, 1.0]
    assert scale.mean is not None
    assert scale.mean.signal == pytest.approx(np.average([1.0, 2.0, 3.0], weights=weights))


def test_a_saved_scale_carries_on() -> None:
    straight, resumed = NoiseScale(), NoiseScale()
    straight.add(Estimate(1.0, 5.0))
    resumed.load_state_dict(straight.state_dict())
    for scale in (straight, resumed):
        scale.add(Estimate(3.0, 7.0))
    assert straight.simple == resumed.simple
    assert all(type(value) is float for value in straight.state_dict().values())


@pytest.mark.parametrize(("small", "big"), [(32, 32), (0, 8), (64, 32)])
def test_batches_that_do_not_differ_are_refused(small: int, big: int) -> None:
    with pytest.raises(ValueError, match=f"got {small} and {big}"):
        estimate(small_batch=small, small_squared=1.0, big_batch=big, big_squared=1.0)


def test_a_decay_of_one_is_refused() -> None:
    with pytest.raises(ValueError, match=r"in \[0, 1\), got 1.0"):
        NoiseScale(1.0)
