"""Theorem 5.2 of Steinke, Nasr and Jagielski 2023 against fixed values of scipy's binomials, and its error rate."""

import math
import random

import pytest

from atoll.protocol.privacy.one_run_audit import Score, best_of, bound_max, lower_bound, p_value


@pytest.mark.parametrize(
    ("canaries", "guesses", "right", "epsilon", "delta", "expected"),
    [
        (1000, 100, 90, 1.0, 1e-5, 0.0008412885614385305),
        (5000, 5000, 3000, 0.3, 1e-5, 0.0006538817449827138),
        (100, 50, 50, 2.0, 1e-3, 0.023387040559199872),
        (1000, 400, 380, 2.5, 1e-5, 0.027404649690255155),
        (10, 4, 0, 1.0, 1e-3, 1.0),
    ],
)
def test_the_p_value_is_that_of_another_program(
    canaries: int, guesses: int, right: int, epsilon: float, delta: float, expected: float
) -> None:
    assert p_value(canaries, guesses, right, epsilon, delta) == pytest.approx(expected, rel=1e-9)


@pytest.mark.parametrize(
    ("canaries", "guesses", "right", "delta", "error_rate", "expected"),
    [
        (1000, 100, 96, 1e-5, 0.0125, 2.083425),
        (5000, 200, 186, 1e-5, 0.0125, 1.930275),
        (100, 50, 50, 1e-3, 0.05, 2.481251),
        (1000, 900, 900, 1e-5, 0.05, 5.676727),
        (1000, 400, 210, 1e-5, 0.05, 0.0),
    ],
)
def test_the_lower_bound_is_that_of_another_program(
    canaries: int, guesses: int, right: int, delta: float, error_rate: float, expected: float
) -> None:
    assert lower_bound(canaries, guesses, right, delta, error_rate) == pytest.approx(expected, abs=5e-5)


def test_without_delta_it_is_the_binomial_test() -> None:
    """All r guesses are right with probability p^r, so p = e^epsilon / (1 + e^epsilon) is refuted below a^(1/r)."""
    least = 0.05 ** (1 / 30)
    assert lower_bound(30, 30, 30, 0.0) == pytest.approx(math.log(least / (1 - least)), abs=1e-6)


def test_a_bound_is_above_the_truth_as_seldom_as_it_says() -> None:
    """Randomized response is exactly epsilon-private: each bit is told with probability e^epsilon / (1 + e^epsilon)."""
    rng, epsilon, trials, above = random.Random(0), 1.0, 300, 0
    told = math.exp(epsilon) / (1 + math.exp(epsilon))
    for _ in range(trials):
        is_in = [rng.random() < 0.5 for _ in range(60)]
        values = [float(taken is (rng.random() < told)) + 1e-3 * rng.random() for taken in is_in]
        above += best_of([Score("bit", values)], is_in, 0.0).bound > epsilon
    assert above <= 0.05 * trials


def test_no_bound_is_above_the_one_of_right_guesses() -> None:
    is_in = [i % 2 == 0 for i in range(200)]
    scores = [Score("bit", [float(taken) for taken in is_in])]
    found = best_of(scores, is_in, 1e-5)
    assert (found.guesses, found.right) == (180, 180)
    assert found.bound == bound_max(scores, 200, 1e-5)
    assert best_of([Score("none", [0.0] * 200)], is_in, 1e-5).bound == 0.0
