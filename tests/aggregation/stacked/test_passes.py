"""The passes over rows: what they say, by numpy and by the compiled loops, wherever the rows lie."""

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from atoll.aggregation.stacked import passes
from atoll.aggregation.stacked.passes import ByNumpy, Compiled, compiled, passes_over
from atoll.tensors.numba_support import has_compiler

needs_compiler = pytest.mark.skipif(not has_compiler(), reason="needs numba: make setup installs it")

KINDS = [ByNumpy, *([lambda values: Compiled(values, compiled())] if has_compiler() else [])]


def apart(matrix):
    """The rows, each in memory of its own."""
    return [row.copy() for row in matrix]


def strided(matrix):
    """Rows that are no neighbours, of which each second column is taken."""
    wide = np.full((2 * len(matrix), 2 * matrix.shape[1]), np.float32(7))
    wide[::2, ::2] = matrix
    return wide[::2, ::2]


HELD = [np.asarray, apart, strided]


@pytest.mark.slow
@pytest.mark.parametrize("held", HELD)
@pytest.mark.parametrize("passes_of", KINDS)
def test_magnitudes_are_the_largest_of_each_row_in_these_columns(passes_of, held):
    matrix = np.array([[9, -3, 2, 9], [9, 0, -0.0, 9], [9, 1, -5, 9]], np.float32)
    assert passes_of(held(matrix)).magnitudes(1, 3).tolist() == [3, 0, 5]
    assert passes_of(held(matrix)).magnitudes(2, 2).tolist() == [0, 0, 0]


@pytest.mark.parametrize("held", HELD)
@pytest.mark.parametrize("passes_of", KINDS)
@pytest.mark.parametrize("count", [1, 2, 5])
def test_sums_are_of_rounded_products(passes_of, held, count):
    matrix = np.array([[9, 0.5, 1.5, -2.6, 9]] * count, np.float32)
    scales = np.array([1.0] * (count - 1) + [2.0])
    expected = [1, 2 * (count - 1) + 3, -3 * (count - 1) - 5]  # half to even
    assert passes_of(held(matrix)).sum(1, 4, scales).tolist() == expected


@pytest.mark.parametrize("value", [np.nan, np.inf, -np.inf])
@pytest.mark.parametrize("passes_of", KINDS)
def test_a_row_with_a_value_that_is_not_finite_has_no_finite_magnitude(passes_of, value):
    matrix = np.ones((3, 40), np.float32)
    matrix[1, 30] = value
    assert np.isfinite(passes_of(matrix).magnitudes(0, 40)).tolist() == [True, False, True]


@needs_compiler
@settings(max_examples=150, deadline=None)
@given(
    seed=st.integers(0, 2**32 - 1),
    count=st.integers(1, 9),
    width=st.sampled_from([1, 7, 33, 2047, 2048, 2049, 5000]),
    held=st.sampled_from(HELD),
    threads_from=st.sampled_from([1, 1 << 20]),
)
def test_compiled_and_numpy_give_the_same_bits(seed, count, width, held, threads_from):
    rng = np.random.default_rng(seed)
    matrix = (rng.standard_normal((count, width)) * 10.0 ** rng.integers(-30, 30, (count, 1))).astype(np.float32)
    start, stop = sorted(rng.integers(0, width + 1, 2).tolist())
    with pytest.MonkeyPatch.context() as monkeypatch:
        monkeypatch.setattr(passes, "THREADS_FROM", threads_from)
        ours, theirs = Compiled(held(matrix), compiled()), ByNumpy(held(matrix))
        assert ours.magnitudes(start, stop).tobytes() == theirs.magnitudes(start, stop).tobytes()
        bounded, scales = np.clip(matrix, -1e6, 1e6), rng.uniform(0, 1e6, count)  # sums below 2^53, as on a grid
        ours, theirs = Compiled(held(bounded), compiled()), ByNumpy(held(bounded))
        assert ours.sum(start, stop, scales).tobytes() == theirs.sum(start, stop, scales).tobytes()


@needs_compiler
def test_much_is_folded_by_the_compiled_loops_and_little_is_not(monkeypatch):
    matrix = np.ones((2, 3), np.float32)
    monkeypatch.setattr(passes, "loops_for", lambda num_values: compiled() if num_values >= 6 else None)
    assert isinstance(passes_over(matrix, 3), Compiled)
    assert isinstance(passes_over(matrix[:1], 3), ByNumpy)
