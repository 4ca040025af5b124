from fractions import Fraction

import numpy as np
import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from atoll.aggregation.fold.integers import INT64_SAFE, apply_mean, rounded_mean, sum_dtype, weighted_sum

int64s = st.integers(-100, 100) | st.integers(-(1 << 63), (1 << 63) - 1)
terms = st.lists(st.tuples(int64s, st.integers(1, 9) | st.integers(1, 1 << 53)), min_size=1, max_size=8)


def mean_of(values, weights, dtype):
    blocks = ((np.array([value], np.int64), weight) for value, weight in zip(values, weights, strict=True))
    return rounded_mean(weighted_sum(blocks, 1, dtype=dtype), total_weight=sum(weights))


@given(terms=terms)
@example(terms=[(1, 1), (0, 1)])
@example(terms=[(3, 1), (0, 1)])
@example(terms=[(-1, 1), (0, 1)])
@example(terms=[(-3, 1), (0, 1)])
@example(terms=[(INT64_SAFE, 1)])
@example(terms=[(-INT64_SAFE // 2, 1), (-INT64_SAFE // 2, 1)])
@example(terms=[(1, INT64_SAFE - 1), (-1, 1)])
@example(terms=[(-(1 << 63), 1 << 53)] * 8)
def test_integer_mean_rounds_half_to_even_as_rationals_do(terms):
    values, weights = zip(*terms, strict=True)
    exact = round(Fraction(sum(w * u for u, w in terms), sum(weights)))
    dtype = sum_dtype(max(map(abs, values)), total_weight=sum(weights))
    assert int(mean_of(values, weights, dtype)[0]) == exact
    assert int(mean_of(values, weights, object)[0]) == exact


def test_integer_sums_use_int64_up_to_two_to_the_62_only():
    assert sum_dtype(1 << 31, total_weight=1 << 31) is np.int64
    assert sum_dtype((1 << 31) + 1, total_weight=1 << 31) is object
    assert sum_dtype(0, total_weight=INT64_SAFE) is np.int64
    assert sum_dtype(0, total_weight=INT64_SAFE + 1) is object


@given(
    base=int64s, mean=int64s | st.integers(-(1 << 80), 1 << 80), kind=st.sampled_from(["i1", "u1", "<i2", "<i4", "<i8"])
)
@example(base=(1 << 63) - 1, mean=1, kind="<i8")
@example(base=-(1 << 63), mean=(1 << 63) - 1, kind="<i8")
@example(base=255, mean=-255, kind="u1")
@example(base=0, mean=-1, kind="u1")
def test_integer_result_is_exact_or_refused(base, mean, kind):
    array = np.array([mean], object if abs(mean) > INT64_SAFE else np.int64)
    info = np.iinfo(kind)
    if info.min <= base + mean <= info.max:
        new = apply_mean(np.array([base]), array, np.dtype(kind))
        assert (new.dtype, int(new[0])) == (np.dtype(kind), base + mean)
    else:
        with pytest.raises(ValueError, match=f"value {base + mean} is not in {info.min}"):
            apply_mean(np.array([base]), array, np.dtype(kind))
