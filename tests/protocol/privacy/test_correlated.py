"""The sensitivity of correlated noise, against brute force over every allowed pattern of participation."""

import itertools
import math

import pytest

from atoll.protocol.privacy.correlated import (
    best_bands,
    errors,
    inverse_of,
    inverse_square_root,
    sensitivity,
    squared_sensitivity,
)


def square_root(bands: int) -> tuple[float, ...]:
    """Return the first coefficients of (1 - x)^(-1/2) = 1 + x/2 + 3x^2/8 + ..., whose square is 1 / (1 - x)."""
    found = [1.0]
    for j in range(1, bands):
        found.append(found[-1] * (2 * j - 1) / (2 * j))
    return tuple(found)


def test_the_square_root_squared_is_the_sum_of_all_rounds() -> None:
    c = square_root(8)
    assert c[:4] == (1.0, 1 / 2, 3 / 8, 5 / 16)
    assert [sum(c[i] * c[t - i] for i in range(t + 1)) for t in range(8)] == pytest.approx([1.0] * 8)
    d = inverse_square_root(8)
    assert d[:4] == (1.0, -1 / 2, -1 / 8, -1 / 16)
    assert inverse_of(d, 8) == pytest.approx(c)


@pytest.mark.parametrize(
    ("c", "rounds", "separation", "uses", "squared"),
    [
        (square_root(4), 8, 4, 2, 2.976562),
        (square_root(10), 100, 10, 10, 17.913439),
        (inverse_of(inverse_square_root(3), 10), 10, 3, 3, 6.350649),
        (inverse_of(inverse_square_root(4), 12), 12, 3, 4, 10.714843),
        (inverse_of(inverse_square_root(2), 14), 14, 4, 3, 4.34338),
    ],
)
def test_squared_sensitivity(c: tuple[float, ...], rounds: int, separation: int, uses: int, squared: float) -> None:
    assert squared_sensitivity(c, rounds, separation, uses) == pytest.approx(squared, abs=1e-5)


def _brute_force(c: tuple[float, ...], rounds: int, separation: int, uses: int) -> float:
    """Return the largest squared norm of C x, over patterns of uses and signs of one-dimensional contributions."""
    padded = [*c, *[0.0] * rounds][:rounds]
    largest = 0.0
    for count in range(1, uses + 1):
        for chosen in itertools.combinations(range(rounds), count):
            if any(later - earlier < separation for earlier, later in itertools.pairwise(chosen)):
                continue
            for signs in itertools.product((1.0, -1.0), repeat=count):
                column = [
                    sum(sign * padded[t - s] for s, sign in zip(chosen, signs, strict=True) if t >= s)
                    for t in range(rounds)
                ]
                largest = max(largest, math.fsum(value * value for value in column))
    return largest


@pytest.mark.parametrize(("bands", "rounds", "separation", "uses"), [(3, 9, 2, 3), (2, 8, 3, 2), (4, 7, 1, 3)])
def test_no_pattern_of_participation_is_above_it(bands: int, rounds: int, separation: int, uses: int) -> None:
    d = inverse_square_root(bands)
    most = _brute_force(inverse_of(d, rounds), rounds, separation, uses)
    assert sensitivity(d, rounds, separation, uses) ** 2 == pytest.approx(most)


def test_coefficients_that_rise_or_change_their_sign_are_bounded_from_above() -> None:
    for c in ((1.0, 2.0, 0.5), (1.0, -0.5, 0.3), (0.1, 0.2, 3.0)):
        assert squared_sensitivity(c, 6, 2, 2) >= _brute_force(c, 6, 2, 2)


def test_coefficients_go_on_where_those_of_the_noise_end() -> None:
    """With the length of d in place of all rounds the first figure becomes the second (jax_privacy#238)."""
    c = square_root(10)
    assert squared_sensitivity(c, 100, 10, 10) == pytest.approx(17.913, abs=0.001)
    assert squared_sensitivity(c, 10, 10, 10) == pytest.approx(1.791, abs=0.001)


@pytest.mark.parametrize(
    ("rounds", "separation", "uses", "independent", "banded"),
    [
        (40, 4, 10, (13.57, 20.00), (8.84, 11.87)),
        (100, 10, 10, (21.23, 31.62), (9.78, 13.05)),
    ],
)
def test_errors_of_sums_over_rounds(
    rounds: int, separation: int, uses: int, independent: tuple[float, float], banded: tuple[float, float]
) -> None:
    assert errors((1.0,), rounds, separation, uses) == pytest.approx(independent, abs=0.01)
    best = inverse_square_root(best_bands(rounds, separation, uses))
    assert errors(best, rounds, separation, uses) == pytest.approx(banded, abs=0.01)
