"""The list of metrics, the buckets of histograms, and the bound on series."""

import re

import pytest
from hypothesis import given
from hypothesis import strategies as st

from atoll.telemetry.instruments import BY_NAME, INSTRUMENTS, SERIES_MAX, Buckets, Kind, bounded


def test_names_follow_the_rules_of_opentelemetry() -> None:
    assert len(BY_NAME) == len(INSTRUMENTS)
    for instrument in INSTRUMENTS:
        name = instrument.name
        assert re.fullmatch(r"(atoll|process|cpython)(\.[a-z][a-z_]*)+", name)
        assert not name.endswith(("total", "seconds", "bytes", "count"))  # the exporter adds kind and unit
        assert instrument.unit in ("s", "By", "1") or re.fullmatch(r"\{[a-z_]+\}", instrument.unit)
        assert bool(instrument.bounds) == (instrument.kind is Kind.HISTOGRAM)
        assert list(instrument.bounds) == sorted(set(instrument.bounds))
        assert not any("client" in attribute or "site" in attribute for attribute in instrument.attributes)


@given(st.lists(st.floats(-10, 1e6), max_size=50), st.lists(st.floats(0, 1e5), unique=True, max_size=8).map(sorted))
def test_a_bucket_has_what_is_not_above_its_bound(values: list[float], bounds: list[float]) -> None:
    found = Buckets(bounds)
    for value in values:
        found.add(value)
    below = [sum(value <= bound for value in values) for bound in bounds]
    assert [sum(found.counts[: at + 1]) for at in range(len(bounds))] == below
    assert sum(found.counts) == len(values)
    assert found.total == pytest.approx(sum(values))
    kept = found.copy()
    found.add(1.0)
    assert sum(kept.counts) == len(values)


def test_series_beyond_the_limit_are_counted_and_not_folded() -> None:
    series = [({"atoll.rank": number}, number) for number in range(SERIES_MAX + 7)]
    found = bounded({"atoll.rank.io": series, "atoll.rank.connected": series[:3]})
    assert found["atoll.rank.io"] == series[:SERIES_MAX]
    assert found["atoll.rank.connected"] == series[:3]
    assert found["atoll.series.dropped"] == [({"atoll.series.kind": "series"}, 7)]
    whole = bounded({"atoll.rank.io": series[:SERIES_MAX], "atoll.series.dropped": [({"atoll.series.kind": "run"}, 2)]})
    kinds = [({"atoll.series.kind": "run"}, 2), ({"atoll.series.kind": "series"}, 0)]
    assert whole == {"atoll.rank.io": series[:SERIES_MAX], "atoll.series.dropped": kinds}
