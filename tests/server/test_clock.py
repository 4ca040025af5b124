import time

from atoll.server.clock import Clock


def test_clock_shows_seconds_since_the_epoch():
    assert abs(Clock().now() - time.time()) < 5


def test_clock_never_shows_an_instant_before_the_last_one_of_the_journal():
    future = time.time() + 1000
    clock = Clock(not_before=future)
    assert clock.now() >= future
    clock.advance_to(future + 50)
    assert clock.now() >= future + 50


def test_clock_is_not_moved_by_an_older_instant_or_by_the_wall_clock(monkeypatch):
    clock = Clock()
    before = clock.now()
    clock.advance_to(before - 1000)
    monkeypatch.setattr(time, "time", lambda: before - 3600)
    assert before <= clock.now() < before + 5


def test_a_rounded_sum_shows_no_instant_before_the_last_one_of_the_journal():
    monotonic, last = 812289.8337703943, 1602104261.0188959
    assert monotonic + (last - monotonic) < last, "the sum is rounded down"
    assert Clock(last, wall=lambda: 0.0, monotonic=lambda: monotonic).now() == last
