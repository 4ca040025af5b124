"""The accounts of the Poisson-subsampled Gaussian mechanism: the built-in bound, and the library's tight one."""

import pytest

from atoll.protocol.privacy import gaussian, loss_distribution
from atoll.protocol.privacy.subsampled import epsilon_bound, noise_multiplier_bound, rdp_of

WITHIN = 1e-3
KNOWN = [  # q, z, steps, epsilon by Rényi divergences, by privacy loss distributions
    (0.01, 4.0, 10_000, 1.03549, 0.946999),
    (256 / 60_000, 1.1, 14_062, 2.596556, 2.381686),
    (0.04, 1.5, 2_250, 7.329335, 6.768787),
    (0.0025, 1.3, 6_000, 0.724223, 0.640111),
]


@pytest.mark.parametrize(("q", "z", "steps", "bound", "tight"), KNOWN)
def test_epsilon_of_steps(q: float, z: float, steps: int, bound: float, tight: float) -> None:
    assert epsilon_bound(q, z, steps, 1e-5) == pytest.approx(bound, abs=WITHIN)
    assert epsilon_bound(q, z, steps, 1e-5) > tight


def test_the_library_is_tighter_and_never_above_the_bound() -> None:
    for q, z, steps, _, tight in KNOWN[:2]:
        assert loss_distribution.epsilon_of(q, z, steps, 1e-5) == pytest.approx(tight, abs=WITHIN)


LITTLE_NOISE = [  # q, z, steps: those that took seconds to minutes on the library's own grid, and usual ones
    (0.04, 0.5, 150),
    (0.001, 0.3, 500),
    (0.1, 0.2, 2),
    (0.01, 0.4, 30),
    (0.5, 0.7, 20),
    (0.01, 2.0, 1000),
    (0.001, 1.0, 30_000),
]


@pytest.mark.skipif(not loss_distribution.is_installed(), reason="needs the extra `privacy`")
@pytest.mark.parametrize(("q", "z", "steps"), LITTLE_NOISE)
def test_a_coarse_grid_is_an_upper_bound_and_close_to_a_finer_one(
    q: float, z: float, steps: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The grids are coarser than the one in use, by which accounts take a second, and as fine beside each other."""
    found = []
    for points in (1 << 11, 1 << 13, 1 << 15):
        monkeypatch.setattr(loss_distribution, "POINTS", points)
        found.append(loss_distribution.epsilon_of(q, z, steps, 1e-6))
    coarsest, coarse, fine = found
    assert fine <= coarse <= coarsest
    assert coarse <= (1.1 if steps > 1000 else 1.001) * fine


@pytest.mark.skipif(not loss_distribution.is_installed(), reason="needs the extra `privacy`")
@pytest.mark.parametrize(("z", "steps"), [(0.3, 5), (0.1, 1), (1.0, 50), (4.0, 50), (2.0, 2000)])
def test_a_coarse_grid_is_above_the_exact_epsilon_where_that_is_known(
    z: float, steps: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(loss_distribution, "POINTS", 1 << 14)
    exact = gaussian.epsilon_of(gaussian.mu_of([(z, steps)]), 1e-6)
    bound = epsilon_bound(1.0, z, steps, 1e-6)
    assert exact <= loss_distribution.epsilon_of(1.0, z, steps, 1e-6, bound) <= 1.001 * exact


@pytest.mark.parametrize("z", [0.05, 0.1, 0.3, 1.0, 20.0])
def test_a_grid_has_a_bounded_number_of_points(z: float) -> None:
    kinds = [(0.01, z, 10), (0.5, 30.0, 10)]
    for about in (0.0, 1.0, loss_distribution.BOUND_MAX):
        step = loss_distribution.step_of(kinds, about)
        assert step >= loss_distribution.STEP_MIN
        assert max(about, 1 / (2 * z * z) + 9 / z) / step <= loss_distribution.POINTS * (1 + 1e-12)


def test_all_records_in_each_step_is_the_plain_mechanism() -> None:
    assert rdp_of(1.0, 2.0, 5) == pytest.approx(5 / 8)
    assert rdp_of(1.0 - 1e-12, 2.0, 5) == pytest.approx(5 / 8, rel=1e-9)
    exact = gaussian.epsilon_of(gaussian.mu_of([(4.0, 50)]), 1e-6)
    assert exact < epsilon_bound(1.0, 4.0, 50, 1e-6) < 1.1 * exact


def test_noise_of_an_epsilon_is_the_least_one() -> None:
    z = noise_multiplier_bound(1.0, 1e-5, 0.01, 1000)
    assert epsilon_bound(0.01, z, 1000, 1e-5) <= 1.0 < epsilon_bound(0.01, z * 0.999, 1000, 1e-5)
    with pytest.raises(ValueError, match="no noise multiplier up to 1e"):
        noise_multiplier_bound(1e-12, 1e-300, 1.0, 10**6)


def test_a_fresh_accountant_for_each_round_is_wrong() -> None:
    one, three = (epsilon_bound(0.05, 1.0, 100 * rounds, 1e-5) for rounds in (1, 3))
    assert three > 1.3 * one
