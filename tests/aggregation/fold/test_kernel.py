"""The compiled loop and numpy's give the same bits, whatever the values."""

import numpy as np
import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st
from hypothesis.extra import numpy as hnp

from atoll.aggregation.fold import kernel
from atoll.aggregation.fold.kernel import add_within_by_numpy, add_within_for, compiled
from atoll.tensors.numba_support import COMPILED_FROM, has_compiler

pytestmark = pytest.mark.skipif(not has_compiler(), reason="needs numba: make setup installs it")

floats = st.floats(width=32)


@settings(max_examples=300, deadline=None)
@given(
    values=hnp.arrays(np.float32, st.integers(1, 70), elements=floats),
    power=st.integers(-250, 250),
    weight=st.integers(1, 1 << 53),
    magnitude=st.floats(0, 3.5e38),
)
@example(values=np.array([0.5, 1.5, 2.5, -0.5, -1.5, -0.0], np.float32), power=0, weight=1, magnitude=2.5)  # ties
@example(values=np.array([np.nan], np.float32), power=0, weight=1, magnitude=1.0)
def test_compiled_and_numpy_give_the_same_bits_and_the_same_verdict(values, power, weight, magnitude):
    scale = np.float64(np.ldexp(float(weight), power))
    ours, theirs = np.arange(values.size) * 3.0, np.arange(values.size) * 3.0
    with np.errstate(all="ignore"):
        verdict = add_within_by_numpy(theirs, values, scale, magnitude)
    assert bool(compiled()(ours, values, scale, magnitude)) is verdict
    is_number = ~np.isnan(theirs)  # of NaN the bits are nobody's promise
    assert np.array_equal(is_number, ~np.isnan(ours))
    assert ours[is_number].tobytes() == theirs[is_number].tobytes()
    with np.errstate(invalid="ignore"):
        assert verdict is bool((np.abs(values.astype(np.float64)) <= magnitude).all())


def test_many_elements_are_compiled_and_few_are_not(monkeypatch):
    assert add_within_for(COMPILED_FROM - 1) is add_within_by_numpy
    assert add_within_for(COMPILED_FROM) is compiled()
    monkeypatch.setattr(kernel, "has_compiler", lambda: False)
    assert add_within_for(COMPILED_FROM) is add_within_by_numpy
