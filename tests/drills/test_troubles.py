"""The troubles of a drill follow from its seed."""

import math
from itertools import islice

import pytest
from hypothesis import given
from hypothesis import strategies as st

from atoll.drills.troubles import Troubles, waits

POSITIVE = st.floats(1e-3, 1e6)


@given(POSITIVE, st.integers())
def test_instants_have_their_mean_distance_and_the_same_seed_the_same_ones(every_s: float, seed: int) -> None:
    found = [*islice(waits(every_s, seed), 2000)]
    assert found == [*islice(waits(every_s, seed), 2000)]
    assert all(0.5 * every_s <= wait <= 1.5 * every_s for wait in found)
    assert sum(found) / len(found) == pytest.approx(every_s, rel=0.05)  # 7 sigma of sqrt(1/12/2000)
    assert [*islice(waits(every_s, seed + 1), 10)] != found[:10]


@given(POSITIVE, st.floats(0, 100))
def test_instants_end_with_their_time(every_s: float, times: float) -> None:
    found = [*waits(every_s, 7, every_s * times)]
    assert sum(found) <= every_s * times * (1 + 1e-9)
    assert len(found) >= math.floor(times / 1.5) - 1


@given(st.floats(0, 1))
def test_a_share_of_the_cuts_is_half_open(half_open: float) -> None:
    cuts = [*islice(Troubles(cut_every_s=5.0, half_open=half_open, seed=3).cuts(), 4000)]
    share = sum(cut.is_half_open for cut in cuts) / len(cuts)
    assert share == pytest.approx(half_open, abs=0.04)  # 5 sigma of sqrt(1/4/4000)
    assert not [*Troubles().cuts()]


def test_each_connection_and_direction_has_delays_of_its_own() -> None:
    line = Troubles(latency_s=0.1, jitter_s=0.05, seed=4)
    ways = [tuple(islice(line.delays(number, way), 50)) for number in (1, 2) for way in ("up", "down")]
    assert len({*ways}) == 4
    assert all(0.1 <= delay < 0.15 for way in ways for delay in way)
    assert ways[0] == tuple(islice(line.delays(1, "up"), 50))


def test_impossible_troubles_are_told_all_at_once() -> None:
    faults = Troubles(latency_s=-1, jitter_s=math.nan, rate=math.inf, cut_every_s=-0.1, half_open=1.5).faults()
    assert [fault.split(" = ")[0] for fault in faults] == ["latency", "jitter", "rate", "cut-every", "half-open"]
    assert Troubles(half_open=0.5).faults() == [
        "half-open = 0.5 is a share of the cuts, and there are none: add --cut-every"
    ]
    assert not Troubles(latency_s=1, jitter_s=1, rate=1, cut_every_s=1, half_open=1).faults()
