"""The encoding of an update: its error, its range, its overflow."""

import math
from fractions import Fraction

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from atoll.tensors.secure.vector import (
    VALUE_BITS,
    clip_factor,
    decode,
    encode,
    fault_of,
    fill_of,
    next_exponent,
    step_of,
    weight_of,
)

BITS = [32, 64]


def draws(count, seed=0):
    return np.random.default_rng(seed).integers(0, 2**32, count, np.uint32)


@pytest.mark.parametrize("bits", BITS)
@given(st.lists(st.floats(-1, 1, width=32), min_size=1, max_size=50), st.floats(0.001, 1), st.booleans())
def test_a_value_comes_back_within_a_step(bits, values, factor, is_random):
    values = np.array(values, np.float32)
    words, fill = encode(values, factor, bits, 1.0, draws(values.size) if is_random else None)
    assert words.dtype.itemsize * 8 == bits
    steps = 1.0 if is_random else 0.5
    error = np.abs(decode(words, bits, 1.0) - values.astype(np.float64) * factor)
    assert error.max() <= steps * step_of(bits, 1.0) * (1 + 1e-9)
    assert fill.cut == 0
    assert fill.largest == pytest.approx(np.abs(values.astype(np.float64)).max() * factor)


@pytest.mark.parametrize("bits", BITS)
def test_the_sum_of_most_members_at_the_end_of_the_range_does_not_wrap(bits):
    for sign in (1, -1):
        words, _ = encode(np.full(3, sign, np.float32), 1.0, bits, 1.0, None)
        total = np.zeros_like(words)
        for _ in range(64):
            total += words
        assert np.allclose(decode(total, bits, 1.0), 64 * sign, rtol=1e-12)


def test_values_beyond_the_range_are_cut_and_counted():
    words, fill = encode(np.array([2.0, -3.0, 0.5], np.float32), 1.0, 32, 1.0, None)
    assert decode(words, 32, 1.0)[:2].tolist() == [1.0, -1.0]
    assert fill == (2, 1.0)


def test_rounding_at_random_has_no_bias():
    """The mean of 10^6 draws of 0.3 steps is 0.3 within five standard errors."""
    count = 10**6
    step = step_of(32, 1.0)
    words, _ = encode(np.full(count, 0.3 * step), 1.0, 32, 1.0, draws(count))
    mean = decode(words, 32, 1.0).mean() / step
    assert abs(mean - 0.3) < 5 * math.sqrt(0.3 * 0.7 / count)


def test_what_is_not_finite_is_refused():
    for value in (math.nan, math.inf, -math.inf):
        with pytest.raises(ValueError, match="not finite"):
            encode(np.array([0.0, value], np.float32), 1.0, 32, 1.0, None)
        with pytest.raises(ValueError, match="norm of the update is"):
            clip_factor(abs(value), 1.0)


@pytest.mark.parametrize(("norm", "expected"), [(0.0, 1.0), (0.5, 1.0), (1.0, 1.0), (2.0, 0.5), (1e300, 1e-300)])
def test_an_update_is_clipped_to_the_norm_and_a_zero_one_stays(norm, expected):
    assert clip_factor(norm, 1.0) == expected


def test_no_configuration_that_is_allowed_overflows():
    assert all(fault_of(bits, 64) == "" for bits in BITS)
    most = {bits: (2 ** (bits - 1) - 1) // (2 ** (VALUE_BITS[bits] - 1) - 1) for bits in BITS}
    for bits in BITS:
        assert fault_of(bits, most[bits]) == ""
        assert f"{most[bits] + 1} members in words of {bits} bits" in fault_of(bits, most[bits] + 1)
    assert fault_of(32, 64, 2.0**31) != ""


@pytest.mark.parametrize(
    ("exponent", "cut", "small", "expected"),
    [(-6, 1, 0, -4), (-6, 0, 5, -9), (-6, 0, 4, -6), (-6, 2, 3, -4), (0, 1, 0, 0), (-1, 5, 0, 0), (-23, 0, 5, -24)],
)
def test_the_next_range_follows_what_members_have_counted(exponent, cut, small, expected):
    assert next_exponent(exponent, 5, cut, small) == expected


@given(st.floats(2.0**-60, 1e9), st.sampled_from(BITS), st.integers(-24, 0), st.floats(1e-9, 1.0))
def test_the_fill_of_the_largest_value_is_what_the_encoding_finds(magnitude, bits, exponent, factor):
    values = np.array([magnitude, -magnitude / 3, 0], np.float32)
    value_range = 2.0**exponent
    _, found = encode(values, factor, bits, value_range, None)
    told = fill_of(float(values[0]), factor, bits, value_range)
    assert (min(1, found.cut), found.largest) == told


def test_a_weight_is_a_part_of_the_most_examples_at_most_1():
    one = 2**52
    assert weight_of(7, 0) == weight_of(10_000, 10_000) == weight_of(20_000, 10_000) == one
    assert weight_of(1, 4) == one // 4
    assert weight_of(0.5, 4) == one // 8
    assert weight_of(1e-30, 2**40) == 1
    assert weight_of(1, 3) == round(Fraction(one, 3))
