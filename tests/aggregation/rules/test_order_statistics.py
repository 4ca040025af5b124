"""The sorting network and numpy's sort give the same bits, and both the middle that the formula asks for."""

import itertools
import math

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.extra import numpy as hnp

from atoll.aggregation.rules import order_statistics
from atoll.aggregation.rules.order_statistics import by_network, by_sort, comparators, middle_mean
from atoll.tensors import numba_support

needs_compiler = pytest.mark.skipif(not numba_support.has_compiler(), reason="needs numba: make setup installs it")

values = st.floats(width=32, allow_nan=False, allow_infinity=False) | st.sampled_from([0.0, -0.0, 1.0, -1.0])


def ends(num_rows):
    return st.tuples(st.integers(0, num_rows - 1), st.integers(1, num_rows)).filter(lambda pair: pair[0] < pair[1])


@st.composite
def cases(draw):
    """(rows, first, stop)"""
    num_rows = draw(st.integers(1, 40))
    rows = draw(hnp.arrays(np.float32, (num_rows, draw(st.integers(1, 9))), elements=values))
    return rows, *draw(ends(num_rows))


def by(way, rows, first, stop):
    out = np.full(rows.shape[1], np.nan)
    way(rows, first, stop, out)
    return out


@pytest.mark.slow
@needs_compiler
@settings(deadline=None, max_examples=300)
@given(case=cases())
def test_the_network_and_the_sort_give_the_same_bits_and_leave_the_rows(case):
    rows, first, stop = case
    before = rows.tobytes()
    assert by(by_network, rows, first, stop).tobytes() == by(by_sort, rows, first, stop).tobytes()
    assert rows.tobytes() == before


@pytest.mark.slow
@needs_compiler
@pytest.mark.parametrize("num_rows", [1, 2, 16, 50, 101, 600])
def test_the_network_gives_the_bits_of_the_sort_for_any_tiles_and_memory_order(monkeypatch, num_rows):
    rng = np.random.default_rng(num_rows)
    rows = rng.standard_normal((num_rows, 3001), np.float32) * np.float32(10) ** rng.integers(-30, 30, (num_rows, 3001))
    rows = rows.astype(np.float32)
    for first, stop in {((num_rows - 1) // 2, num_rows // 2 + 1), (num_rows // 5, num_rows - num_rows // 5)}:
        expected = by(by_sort, rows, first, stop).tobytes()
        for tile_values in (1, 1 << 12, order_statistics.TILE_VALUES, 1 << 22):
            monkeypatch.setattr(order_statistics, "TILE_VALUES", tile_values)
            assert by(by_sort, rows, first, stop).tobytes() == expected
            assert by(by_network, rows, first, stop).tobytes() == expected
            assert by(by_network, np.asfortranarray(rows), first, stop).tobytes() == expected
        monkeypatch.undo()


@given(case=cases())
def test_a_middle_mean_is_the_sum_of_the_sorted_values_one_after_the_other(case):
    rows, first, stop = case
    for column, mean in zip(rows.T.tolist(), middle_mean(rows, first, stop).tolist(), strict=True):
        total = 0.0
        for value in sorted(column)[first:stop]:
            total += value
        assert mean == total / (stop - first)
        assert mean != 0.0 or math.copysign(1.0, mean) == 1.0  # the one zero that there is


@pytest.mark.parametrize("num_rows", range(1, 13))
def test_every_network_orders_the_ranks_that_are_asked_for(num_rows):
    """All zeros and ones: what orders these orders everything (Knuth, theorem 5.3.4 Z)."""
    columns = np.array(list(itertools.product((0, 1), repeat=num_rows))).T
    ordered = np.sort(columns, axis=0)
    for first, stop in itertools.combinations(range(num_rows + 1), 2):
        rows = columns.copy()
        for low, high in comparators(num_rows, first, stop):
            assert low < high
            rows[[low, high]] = np.minimum(rows[low], rows[high]), np.maximum(rows[low], rows[high])
        assert np.array_equal(rows[first:stop], ordered[first:stop])


def test_a_median_asks_for_fewer_comparators_than_the_whole_order():
    assert [len(comparators(num_rows, 0, num_rows)) for num_rows in (16, 64)] == [63, 543]  # Knuth, 5.3.4
    assert len(comparators(16, 7, 9)) < 63
    assert len(comparators(1, 0, 1)) == 0


def test_many_values_are_ordered_by_the_network_and_few_by_the_sort(monkeypatch):
    taken = []
    monkeypatch.setattr(order_statistics, "by_network", lambda *_: taken.append("network"))
    monkeypatch.setattr(order_statistics, "by_sort", lambda *_: taken.append("sort"))
    few, many = np.zeros((2, 3), np.float32), np.zeros((2, order_statistics.COMPILED_FROM // 2), np.float32)
    monkeypatch.setattr(order_statistics, "has_compiler", lambda: True)
    middle_mean(few, 0, 1), middle_mean(many, 0, 1)
    monkeypatch.setattr(order_statistics, "has_compiler", lambda: False)
    middle_mean(many, 0, 1)
    assert taken == ["sort", "network", "sort"]
