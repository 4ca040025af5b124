"""The exact account of Gaussian mechanisms, against published figures, a numeric integral and its own inverse."""

import math
import random

import pytest

from atoll.protocol.privacy.gaussian import (
    epsilon_of,
    log_delta_of,
    mu_of,
    mu_within,
    noise_multiplier_of,
    uses_within,
)

WITHIN = 1e-5


@pytest.mark.parametrize(
    ("z", "uses", "delta", "epsilon"),
    [
        (1.0, 1, 0.126936737, 1.0),  # Balle and Wang 2018
        (8.0, 100, 1e-5, 5.679587),  # dp-accounting's privacy loss distributions, from here on
        (1.0, 10, 1e-5, 17.856587),
        (4.0, 50, 1e-6, 9.482192),
        (1.0, 200, 1e-5, 159.441486),
    ],
)
def test_epsilon_of_a_noise(z: float, uses: int, delta: float, epsilon: float) -> None:
    assert epsilon_of(mu_of([(z, uses)]), delta) == pytest.approx(epsilon, abs=WITHIN)


@pytest.mark.parametrize(
    ("epsilon", "delta", "z"), [(1.0, 1e-5, 3.730632), (0.1, 1e-5, 30.749566), (8.0, 1e-6, 0.652935)]
)
def test_noise_of_an_epsilon(epsilon: float, delta: float, z: float) -> None:
    assert noise_multiplier_of(epsilon, delta) == pytest.approx(z, abs=WITHIN)


def test_the_formula_is_the_integral_of_its_definition() -> None:
    for mu, epsilon in ((0.1, 0.01), (1.0, 0.5), (1.0, 3.0), (5.0, 2.0)):
        # delta = integral of max(0, p(x) - e^epsilon q(x)) with p = N(mu, 1), q = N(0, 1)
        step = 1e-3
        points = (step * k for k in range(round(-12 / step), round((mu + 12) / step)))
        total = (
            math.fsum(max(0.0, math.exp(-((x - mu) ** 2) / 2) - math.exp(epsilon - x * x / 2)) for x in points)
            * step
            / math.sqrt(2 * math.pi)
        )
        assert math.exp(log_delta_of(epsilon, mu)) == pytest.approx(total, rel=1e-6)


def test_other_noises_add_up_by_their_squares() -> None:
    assert mu_of([(1.0, 2), (2.0, 4), (5.0, 0)]) == pytest.approx(math.sqrt(3.0))
    assert mu_of([]) == 0.0
    assert epsilon_of(0.0, 1e-9) == 0.0


def test_three_rounds_cost_more_than_one_and_less_than_three() -> None:
    one, three = (epsilon_of(mu_of([(4.0, uses)]), 1e-5) for uses in (1, 3))
    assert one < three < 3 * one


def test_tiny_and_huge_values_lose_no_digits() -> None:
    # far in the tail delta ~ phi(x) (1 / x^2) mu, where a difference of two probabilities is 0
    assert -1e6 < log_delta_of(1000.0, 1.0) == pytest.approx(-(999.5**2) / 2 - 0.5 * math.log(2 * math.pi), rel=1e-4)
    assert epsilon_of(1e-4, 1e-300) > 0.0
    assert epsilon_of(30.0, 1e-12) == pytest.approx(450 + 30 * 7.03, rel=0.01)
    for mu in (1e-6, 1e-3, 1.0, 40.0, 1e3):
        for delta in (1e-3, 1e-12, 1e-100):
            epsilon = epsilon_of(mu, delta)
            assert math.exp(log_delta_of(epsilon, mu)) <= delta * (1 + 1e-6)
            if epsilon > 1e-9 * mu:
                assert math.log(delta) - log_delta_of(epsilon * (1 - 1e-6), mu) < 0


def test_noise_for_a_number_of_uses_allows_that_number() -> None:
    draw = random.Random(0)
    for _ in range(300):
        epsilon, delta, uses = 10 ** draw.uniform(-2, 2), 10 ** draw.uniform(-12, -2), draw.randint(1, 5000)
        z = noise_multiplier_of(epsilon, delta, uses)
        assert uses_within(epsilon, delta, z) == uses
        assert epsilon_of(mu_of([(z, uses)]), delta) <= epsilon
        assert uses_within(epsilon, delta, z, spent=mu_of([(z, 1)])) == uses - 1
        assert uses_within(epsilon, delta, z, spent=2 * mu_within(epsilon, delta)) == 0


def test_the_classic_formula_is_not_this_one() -> None:
    """Above epsilon 1 it is unproven, below it is loose (Balle and Wang 2018, section 2)."""
    for asked, exact in ((1.0, 0.751), (4.0, 3.511), (8.0, 7.914)):
        z = math.sqrt(2 * math.log(1.25 / 1e-5)) / asked
        assert epsilon_of(1 / z, 1e-5) == pytest.approx(exact, abs=0.001)
