"""The statistics of a tally, by numpy and by the compiled loop: the same bits, and right."""

import math

import numpy as np
import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st
from hypothesis.extra import numpy as hnp

from atoll.tensors.numba_support import has_compiler
from atoll.tensors.updates import tensor_stats
from atoll.tensors.updates.tensor_stats import BYTES_MAX, LANES, Tally, compiled, look, look_by_numpy

SIZES = st.one_of(st.integers(1, 40), st.sampled_from([LANES - 1, LANES, LANES + 1, 3 * LANES, 5 * LANES + 7]))


def both(monkeypatch, values, dtype="F32"):
    """Return the statistics by both implementations."""
    found = []
    for loops in [None, *([compiled()] if has_compiler() else [])]:
        monkeypatch.setattr(tensor_stats, "loop_for", lambda num_elements, loops=loops: loops)
        one = Tally(0.0)
        one.add(values, dtype)
        found.append((one.magnitude, one.non_finite, one.squared_norm))
    return found


@settings(max_examples=300, deadline=None)
@given(values=hnp.arrays(np.float32, SIZES, elements=st.floats(width=32)))
@example(values=np.array([-0.0, 0.0], np.float32))
@example(values=np.array([np.nan, -np.inf, 3.0], np.float32))
@example(values=np.array([np.float32(3.4e38), 1e-45], np.float32))
def test_a_tally_is_that_of_the_finite_values_however_it_looks(values):
    with pytest.MonkeyPatch.context() as monkeypatch:
        found = both(monkeypatch, values)
    assert all(one == found[0] for one in found)
    magnitude, non_finite, squared_norm = found[0]
    finite = [float(value) for value in values if math.isfinite(value)]
    assert magnitude == max(map(abs, finite), default=0.0)
    assert non_finite == values.size - len(finite)
    assert squared_norm == pytest.approx(math.fsum(value * value for value in finite), rel=1e-14)


@pytest.mark.parametrize("size", [1, LANES - 1, LANES, 7 * LANES, 7 * LANES + 100, 65536])
def test_both_looks_have_the_same_bits_in_every_lane(monkeypatch, size):
    if not has_compiler():
        pytest.skip("needs numba: make setup installs it")
    monkeypatch.setattr(tensor_stats, "loop_for", lambda num_elements: compiled())
    values = (np.random.default_rng(size).standard_normal(size) ** 5).astype(np.float32)
    values.setflags(write=False)
    ours, theirs = look(values), look_by_numpy(values)
    assert ours[0] == theirs[0]
    assert ours[1].tobytes() == theirs[1].tobytes()


def test_a_lane_has_the_squares_of_each_five_hundred_and_twelfth_value(monkeypatch):
    values = np.arange(1, 2 * LANES + 2, dtype=np.float32)
    _, lanes = look_by_numpy(values)
    expected = [float(values[lane::LANES].astype(np.float64) @ values[lane::LANES]) for lane in range(LANES)]
    assert lanes.tolist() == expected


@pytest.mark.parametrize(
    ("dtype", "raw", "values"),
    [
        ("F16", np.array([1.5, -65504.0, 0.0], np.float16), [1.5, -65504.0, 0.0]),
        ("BF16", np.array([0xC040, 0x3F80], np.uint16), [-3.0, 1.0]),
        ("I8", np.array([-128, 127], np.int8), [-128, 127]),
        ("I64", np.array([-(1 << 63), 5]), [-(1 << 63), 5]),
    ],
)
def test_values_of_every_kind_are_counted(monkeypatch, dtype, raw, values):
    for found in both(monkeypatch, raw, dtype):
        assert found[0] == max(map(abs, values))
        assert found[2] == pytest.approx(math.fsum(float(value) ** 2 for value in values), rel=1e-14)


@pytest.mark.parametrize("dtype", [np.uint8, np.int8])
@pytest.mark.parametrize("size", [1, LANES - 1, 65536, BYTES_MAX, BYTES_MAX + LANES + 1])
def test_integers_of_one_byte_have_the_exact_sum_of_their_squares(dtype, size):
    bounds = np.iinfo(dtype)
    largest = bounds.max if dtype == np.uint8 else bounds.min
    drawn = np.random.default_rng(size).integers(bounds.min, bounds.max, size, dtype, endpoint=True)
    for values in (drawn, np.full(size, largest, dtype)):
        tally = Tally(0)
        tally.add(values, "U8" if dtype == np.uint8 else "I8")
        assert tally.squared_norm == sum(int(value) ** 2 for value in values)
        assert tally.magnitude == max(abs(int(value)) for value in values)
