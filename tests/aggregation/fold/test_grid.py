import math
from fractions import Fraction

import numpy as np
import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from atoll.aggregation.fold.grid import FLOAT32_MAX, grid_exponent, grid_scale, mean_from_grid
from atoll.aggregation.fold.kernel import add_within_by_numpy

TINY = 2.0**-149
float32s = st.floats(width=32, allow_nan=False, allow_infinity=False)
weights = st.integers(1, 100) | st.integers(1, 1 << 53)


def summed(values, ws, exponent):
    total, partials = np.zeros(1), []
    for value, w in zip(values, ws, strict=True):
        assert add_within_by_numpy(total, np.array([value], np.float32), grid_scale(w, exponent), abs(value))
        partials.append(float(total[0]))
    return total, partials


@given(
    magnitude=st.floats(TINY, FLOAT32_MAX, width=32),
    total=st.integers(1, 1 << 104) | st.integers(1, 1 << 399),
    count=st.integers(1, 10**6),
)
@example(magnitude=TINY, total=1, count=1)
@example(magnitude=FLOAT32_MAX, total=(1 << 400) - 1, count=1)
@example(magnitude=1.0, total=1 << 52, count=1)
def test_grid_is_the_finest_whose_sums_stay_below_two_to_the_52(magnitude, total, count):
    total = max(total, count)
    exponent = grid_exponent(magnitude, total_weight=total, count=count)
    assert total * Fraction(magnitude) <= 2**52 * Fraction(2) ** exponent
    assert total * Fraction(magnitude) > 2**51 * Fraction(2) ** exponent
    assert -201 <= exponent <= 476


@settings(max_examples=300)
@given(terms=st.lists(st.tuples(float32s, weights), min_size=1, max_size=20))
@example(terms=[(FLOAT32_MAX, 1 << 53)] * 20)
@example(terms=[(-FLOAT32_MAX, 1 << 53), (TINY, 1)])
@example(terms=[(TINY, 1)] * 3)
@example(terms=[(TINY, 1 << 50), (-TINY, 1), (TINY, (1 << 53) - 1)])
def test_grid_sums_are_exact_integers_and_the_mean_is_near_the_rational_one(terms):
    values, ws = zip(*terms, strict=True)
    total_weight, magnitude = sum(ws), max(map(abs, values))
    exponent = grid_exponent(magnitude, total_weight=total_weight, count=len(ws))
    total, partials = summed(values, ws, exponent)
    quantum = Fraction(2) ** exponent
    exact = 0
    for value, w, partial in zip(values, ws, partials, strict=True):
        rounded = float(np.rint(np.float64(value) * grid_scale(w, exponent)))
        assert abs(rounded - w * Fraction(value) / quantum) <= 1
        exact += int(rounded)
        assert partial == exact
        assert abs(exact) < 2**53
    mean = Fraction(float(mean_from_grid(total, exponent, total_weight=total_weight)[0]))
    rational = sum(w * Fraction(value) for value, w in zip(values, ws, strict=True)) / total_weight
    bound = (len(ws) + 1) * Fraction(magnitude) / 2**52
    assert abs(mean - rational) <= bound + abs(rational) / 2**52


def test_grid_of_zeros_is_one_and_keeps_zeros():
    assert grid_exponent(0.0, total_weight=3, count=2) == 0
    total, _ = summed([0.0, -0.0], [1, 2], 0)
    assert math.copysign(1, total[0]) == 1
    assert total[0] == 0


def test_grid_rounds_half_to_even():
    _, partials = summed([0.5, 1.5, -0.5, 2.5], [1, 1, 1, 1], 0)
    assert partials == [0, 2, 2, 4]


@pytest.mark.parametrize("magnitude", [-1.0, math.nan, math.inf, 3.5e38])
def test_grid_refuses_magnitudes_that_no_float32_has(magnitude):
    with pytest.raises(ValueError, match="magnitude"):
        grid_exponent(magnitude, total_weight=1, count=1)


@pytest.mark.parametrize(("total", "count"), [(1, 0), (2, 3), (1 << 400, 1)])
def test_grid_refuses_weights_that_its_proof_does_not_cover(total, count):
    with pytest.raises(ValueError, match="total weight"):
        grid_exponent(1.0, total_weight=total, count=count)
