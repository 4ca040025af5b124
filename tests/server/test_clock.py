import time

import pytest

from atoll.server.clock import ClockComparison, MonotoneClock, Reading, apart, fault_at_start, jump_between, jumped


def test_clock_shows_seconds_since_the_epoch():
    assert abs(MonotoneClock().now() - time.time()) < 5


def test_clock_never_shows_an_instant_before_the_last_one_of_the_journal():
    future = time.time() + 1000
    clock = MonotoneClock(not_before=future)
    assert clock.now() >= future
    clock.advance_to(future + 50)
    assert clock.now() >= future + 50


def test_clock_is_not_moved_by_an_older_instant_or_by_the_wall_clock(monkeypatch):
    clock = MonotoneClock()
    before = clock.now()
    clock.advance_to(before - 1000)
    monkeypatch.setattr(time, "time", lambda: before - 3600)
    assert before <= clock.now() < before + 5


def test_a_rounded_sum_shows_no_instant_before_the_last_one_of_the_journal():
    monotonic, last = 812289.8337703943, 1602104261.0188959
    assert monotonic + (last - monotonic) < last, "the sum is rounded down"
    assert MonotoneClock(last, wall=lambda: 0.0, monotonic=lambda: monotonic).now() == last


NOON = 1_700_000_000.0
"""2023-11-14 22:13:20 UTC."""
LAST = Reading(NOON, 1000.0, "boot")
DAY = 86400.0


@pytest.mark.parametrize(
    ("now", "words"),
    [
        (Reading(NOON + 5, 1005.0, "boot"), ""),
        (Reading(NOON + 3 * DAY, 1000.0 + 3 * DAY, "boot"), ""),  # down for three days
        (Reading(NOON + 3 * DAY, 7.0, "other"), ""),
        (Reading(NOON + 119, 1001.0, "boot"), ""),
        (Reading(NOON - 119, 7.0, "other"), ""),
        (Reading(NOON + 3605, 1005.0, "boot"), "2023-11-14 23:13:25 UTC, 1 h 0 min ahead of"),
        (Reading(NOON + 3605, 1005.0, "boot"), "and the 5 s that the machine has counted since"),
        (Reading(NOON + 3600, 1000.0 + 7200, "boot"), "1 h 0 min behind"),  # later than the last one, and yet behind
        (Reading(NOON - 600, 1001.0, "boot"), "10 min 0 s behind the journal's last true time, 2023-11-14 22:13:20"),
        (Reading(NOON - 600, 7.0, "other"), "10 min 0 s behind"),
        (Reading(NOON + 365 * DAY, 7.0, "other"), "365 d 0 h ahead of"),
    ],
)
def test_a_start_minutes_away_from_the_last_true_time_is_refused_with_both_times_and_the_way_out(now, words):
    fault = fault_at_start(LAST, now)
    assert words in fault
    assert bool(fault) is bool(words)
    assert not fault or fault.endswith("or, if it is right now, start once with --accept-clock")


def test_a_note_without_a_boot_refuses_only_what_is_behind():
    assert fault_at_start(Reading(NOON), Reading(NOON + 400 * DAY, 1.0, "boot")) == ""
    assert "behind" in fault_at_start(Reading(NOON), Reading(NOON - 300, 1.0, "boot"))


def test_readings_of_two_boots_have_no_jump_between_them():
    assert jump_between(LAST, Reading(NOON, 1.0, "other")) is None
    assert jump_between(Reading(NOON), Reading(NOON + 9)) is None
    assert jump_between(LAST, Reading(NOON + 100, 1010.0, "boot")) == 90.0


def test_a_jump_is_told_once_and_gentle_turns_and_sleep_are_none():
    comparison, told = ClockComparison(LAST), []
    for true, uptime in ((1, 1), (10_001, 10_001), (10_003, 10_002), (13_603, 10_003), (13_604, 10_004), (4, 10_005)):
        told.append(comparison.jump(Reading(NOON + true, 1000.0 + uptime, "boot")))
    assert told == [0.0, 0.0, 0.0, 3600.0, 0.0, -13_601.0]


def test_a_slow_drift_is_told_when_it_has_become_a_jump():
    comparison = ClockComparison(LAST)
    told = [comparison.jump(Reading(NOON + 1.01 * s, 1000.0 + s, "boot")) for s in range(0, 1001, 10)]
    assert [round(jump, 6) for jump in told if jump] == [5.0, 5.0]


def test_the_sentences_name_both_times():
    assert "set back by 10 min 0 s: from 2023-11-14 22:13:20 UTC to 2023-11-14 22:03:20 UTC" in jumped(-600, NOON - 600)
    assert apart(NOON, NOON + 59) == ""
    assert "shows 2023-11-14 22:13:20 UTC, 1 h 0 min behind this machine's clock, which shows" in apart(
        NOON, NOON + 3600
    )
