"""Exact sums against Fractions of Python, for every float64 that there is."""

from fractions import Fraction

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from atoll.training.statistics.exact import number_of, rounded, text_of
from atoll.training.statistics.sums import ColumnSums

floats = st.floats(allow_nan=False, allow_infinity=False, width=64)
dyadic = st.builds(
    lambda m, e: Fraction(m) * Fraction(2) ** e, st.integers(-(2**300), 2**300), st.integers(-2200, 2200)
)


@given(st.lists(st.tuples(floats, st.integers(0, 2)), max_size=30), st.integers(0, 30))
def test_sums_and_sums_of_squares_are_exact_however_the_values_are_divided(
    values: list[tuple[float, int]], cut: int
) -> None:
    sums = ColumnSums(3)
    for part in (values[:cut], values[cut:]):
        sums.add(np.array([v for v, _ in part], np.float64), np.array([c for _, c in part], np.int64))
    of = [[Fraction(value) for value, column in values if column == c] for c in range(3)]
    assert sums.totals() == [sum(column, Fraction()) for column in of]
    assert sums.squares() == [sum((value**2 for value in column), Fraction()) for column in of]


def test_more_values_than_are_exact_at_once_are_divided(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("atoll.training.statistics.sums.ROWS_MAX", 3)
    sums = ColumnSums(1)
    sums.add(np.arange(10.0), np.zeros(10, np.int64))
    assert (sums.totals(), sums.squares()) == ([45], [285])


def test_many_equal_values_stay_exact() -> None:
    sums, value = ColumnSums(1), -0.1
    sums.add(np.full(200_000, value), np.zeros(200_000, np.int64))
    assert sums.totals() == [200_000 * Fraction(value)]
    assert sums.squares() == [200_000 * Fraction(value) ** 2]


@given(dyadic)
def test_the_text_of_a_number_is_read_back_as_it_is(number: Fraction) -> None:
    assert number_of(text_of(number)) == number


@given(floats)
def test_a_float_is_rounded_to_itself(value: float) -> None:
    assert rounded(Fraction(value)) == value


def test_a_number_beyond_float64_has_no_nearest_one() -> None:
    assert rounded(Fraction(1.7e308) * 2) is None
    assert rounded(Fraction(-(10**400))) is None


@pytest.mark.parametrize(
    "text", ["", "p", "1", "2p0", "0p1", "1p", "01p0", "+1p0", "1p9999", "1p+1", " 1p0", "1p0x", "g" * 2000]
)
def test_every_other_text_is_refused(text: str) -> None:
    with pytest.raises(ValueError, match=r"allowed: MpE|invalid literal|no dyadic"):
        number_of(text)


def test_a_third_has_no_text() -> None:
    with pytest.raises(ValueError, match="no dyadic rational"):
        text_of(Fraction(1, 3))
