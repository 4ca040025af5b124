"""Thinned curves: bounded, in order, and with every peak."""

import math

import pytest
from hypothesis import given
from hypothesis import strategies as st

from atoll.server.views.thinning import POINTS_MAX, kept, thinned, thinned_metrics

numbers = st.one_of(st.none(), st.floats(allow_nan=True, allow_infinity=True))


@given(st.lists(numbers, max_size=300), st.sampled_from([4, 6, 10, 100]))
def test_the_extremes_of_each_stretch_stay_and_the_number_is_bounded(values: list[float | None], most: int) -> None:
    places = list(kept(values, most))
    assert len(places) <= most
    assert places == sorted(set(places))
    if len(values) <= most:
        assert places == list(range(len(values)))
        return
    assert (places[0], places[-1]) == (0, len(values) - 1)
    real = [value for value in values if value is not None and not math.isnan(value)]
    shown = [value for place in places if (value := values[place]) is not None and not math.isnan(value)]
    if real:
        assert (min(shown), max(shown)) == (min(real), max(real))


@pytest.mark.parametrize("place", [1, 57_123, 99_998])
def test_a_single_peak_among_a_hundred_thousand_points_is_kept(place: int) -> None:
    points: list[tuple[int, float | None]] = [(number, 0.5) for number in range(100_000)]
    points[place] = (place, 9.0)
    found = thinned(points)
    assert len(found) <= POINTS_MAX
    assert (place, 9.0) in found


def test_each_metric_of_each_source_is_a_curve() -> None:
    num = 3 * POINTS_MAX
    rows = [(version, {"loss": float(-version), "sums": [1.0, 2.0, 3.0]}) for version in range(num)]
    rows[700] = (700, {"loss": 5.0, "accuracy": 1.0, "sums": []})
    found = thinned_metrics({"server": rows, "clients": [(5, {"loss": None})]})
    assert list(found) == sorted(found)
    assert found[700]["server"]["loss"] == 5.0
    assert found[700]["server"]["accuracy"] == 1.0
    assert found[5]["clients"] == {"loss": None}
    for name in ("loss", "sums"):
        assert 1000 <= sum(name in each.get("server", {}) for each in found.values()) <= POINTS_MAX
