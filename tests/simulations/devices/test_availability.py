"""The availability of clients, against hand-written intervals, a plain loop and the hour of the day."""

import itertools
import math
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from atoll.simulations.devices.availability import Availability, edges_of
from atoll.simulations.devices.config import DeviceConfig

DAY_S = 86400.0


def one(*intervals: tuple[float, float], period: float = math.inf) -> Availability:
    return Availability.of([edges_of(intervals, period)], [period])


def changes(awake: Availability, t: float, count: int) -> list[float | None]:
    """Return the next few times of waking or falling asleep."""
    found: list[float | None] = []
    at: float | None = t
    while at is not None and len(found) < count:
        at = awake.next_change(0, at)
        found.append(at)
    return found


def test_intervals_that_do_not_repeat() -> None:
    awake = one((10, 20), (30, 40))
    assert [awake.is_awake(0, t) for t in (0, 9.99, 10, 19.99, 20, 30, 39, 40, 1e9)] == [
        *(False, False, True, True, False, True, True, False, False)
    ]
    assert changes(awake, 0, 9) == [10, 20, 30, 40, None]


def test_intervals_that_repeat() -> None:
    awake = one((10, 20), (30, 40), period=50)
    assert changes(awake, 15, 6) == [20, 30, 40, 60, 70, 80]
    assert [awake.is_awake(0, t) for t in (5, 15, 25, 60, 69, 70, 5015)] == [
        *(False, True, False, True, True, False, True)
    ]


def test_intervals_that_touch_are_one_also_across_the_period() -> None:
    assert changes(one((0, 5), (5, 8)), 0, 9) == [8, None]
    awake = one((0, 5), (20, 50), period=50)
    assert awake.is_awake(0, 0)
    assert changes(awake, 0, 4) == [5, 20, 55, 70]
    assert changes(one((0, 20), (20, 50), period=50), 0, 2) == [None]
    assert one((0, 50), period=50).is_awake(0, 1e6)


@st.composite
def repeating(draw: st.DrawFn) -> tuple[list[tuple[float, float]], float]:
    """Intervals within a period, some touching, on a grid of thousandths."""
    grid = st.integers(0, 50_000).map(lambda n: n / 1000)
    edges = sorted(draw(st.lists(grid, min_size=2, max_size=8, unique=True)))
    if len(edges) % 2:
        edges.pop()
    pairs = [*zip(edges[::2], edges[1::2], strict=True)]
    more = [(a[1], b[0]) for a, b in itertools.pairwise(pairs) if draw(st.booleans())]
    return sorted([*pairs, *more]), draw(st.sampled_from([edges[-1], edges[-1] + 7.25, math.inf]))


@given(repeating(), st.lists(st.floats(0, 1000), min_size=1, max_size=20))
def test_a_client_is_awake_within_an_interval_of_any_period(
    given: tuple[list[tuple[float, float]], float], instants: list[float]
) -> None:
    intervals, period = given
    awake = one(*intervals, period=period)
    for t in instants:
        local = t if math.isinf(period) else t % period
        if min(abs(local - edge) for pair in intervals for edge in (*pair, 0.0, period)) < 1e-6:
            continue  # at an edge, a remainder rounds otherwise
        assert awake.is_awake(0, t) == any(begin <= local < end for begin, end in intervals)


@given(repeating(), st.floats(0, 1e7))
@settings(max_examples=200)
def test_from_change_to_change_time_goes_on_and_sleep_and_waking_take_turns(
    given: tuple[list[tuple[float, float]], float], t: float
) -> None:
    intervals, period = given
    awake = one(*intervals, period=period)
    for _ in range(12):
        after = awake.next_change(0, t)
        if after is None:
            return
        assert after > t
        assert awake.is_awake(0, math.nextafter(after, 0)) == awake.is_awake(0, t)
        assert awake.is_awake(0, after) != awake.is_awake(0, t)
        t = after


# ---------------------------------------------------------------- by the hour


def share_awake(hour: float, **settings: float) -> float:
    names = [str(index) for index in range(500)]
    fleet = DeviceConfig(availability="daily", **settings).of(names, seed=2)  # type: ignore[arg-type]
    return float(np.mean([fleet.is_awake(name, hour * 3600) for name in names]))


def test_with_noons_all_over_the_day_about_as_many_are_awake_at_any_hour() -> None:
    for hour in range(0, 48, 5):
        assert share_awake(hour, awake_hours=6.0) == pytest.approx(0.25, abs=4 * (0.25 * 0.75 / 500) ** 0.5)


def test_with_one_noon_all_are_awake_around_it_and_nobody_else() -> None:
    """The run begins at 8; noon is after 4 hours, and each is awake for 3 before it and 3 after."""
    hours = dict.fromkeys((0.9, 7.1, 16.0, 23.0, 24.9), 0.0) | dict.fromkeys((1.1, 4.0, 6.9, 25.1), 1.0)
    for hour, share in hours.items():
        assert share_awake(hour, awake_hours=6.0, noon_spread=0.0, begins_at=8.0) == share


def test_noons_within_some_hours_make_a_morning_and_an_evening() -> None:
    """Noons uniform in 8 to 16 and 4 hours of waking: the share is a trapezoid from 6 to 18, flat from 10 to 14."""
    for hour, share in {5.9: 0.0, 8.0: 0.25, 10.0: 0.5, 12.0: 0.5, 14.0: 0.5, 16.0: 0.25, 18.1: 0.0}.items():
        found = share_awake(hour, awake_hours=4.0, noon_spread=8.0, begins_at=0.0)
        assert found == pytest.approx(share, abs=4 * (share * (1 - share) / 500) ** 0.5)


def test_some_never_sleep() -> None:
    assert share_awake(12.0, awake_hours=6.0, noon_spread=0.0, sleepless=0.3) == 0.3
    assert share_awake(12.0, awake_hours=24.0, noon_spread=0.0) == 1.0


def test_a_day_has_one_waking_and_one_falling_asleep() -> None:
    fleet = DeviceConfig(availability="daily", awake_hours=7.0).of(["a"], seed=9)
    first = fleet.next_change("a", 0.0)
    assert first is not None
    times = [first]
    for _ in range(4):
        after = fleet.next_change("a", times[-1])
        assert after is not None
        times.append(after)
    lengths = np.diff(times)
    assert sorted(lengths[:2]) == pytest.approx([7 * 3600, 17 * 3600])
    assert lengths[2:] == pytest.approx(lengths[:2])


def test_a_trace_of_intervals_is_what_its_lines_say(tmp_path: Path) -> None:
    path = tmp_path / "awake.csv"
    path.write_text("client,from_s,to_s,period_s\nb,30,40,50\na,0,100,100\nb,10,20,50\nstranger,1,2,3\n")
    fleet = DeviceConfig(availability="trace", awake_trace=path).of(["a", "b"], seed=0)
    assert fleet.next_change("a", 0.0) is None
    assert fleet.is_awake("a", 1e6)
    assert [fleet.next_change("b", t) for t in (0, 10, 25, 40)] == [10, 20, 30, 60]
