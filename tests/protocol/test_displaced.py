import random

from atoll.protocol.displaced import LONGEST_S, Displaced


def displaced(seed=0, first=15.0):
    return Displaced(first, random.Random(seed))


def test_the_wait_grows_with_jitter_up_to_the_longest():
    it = displaced()
    waits = [it.next_wait() for _ in range(10)]
    for wait, bound in zip(waits, [15, 30, 60, *[LONGEST_S] * 7], strict=True):
        assert bound / 2 <= wait <= bound
    assert len(set(waits)) == 10


def test_two_processes_wait_for_different_times():
    assert displaced(1).next_wait() != displaced(2).next_wait()


def test_only_a_place_held_for_longer_than_the_longest_wait_ends_the_growth():
    it = displaced()
    for _ in range(5):
        it.next_wait()
    it.held_for(LONGEST_S)  # as long as the other one may wait: it comes back
    assert it.next_wait() > LONGEST_S / 2 - 1e-9
    it.held_for(LONGEST_S + 1)
    assert it.next_wait() <= 15


def test_a_first_wait_beyond_the_longest_stays():
    it = displaced(first=3600.0)
    assert all(1800 <= it.next_wait() <= 3600 for _ in range(5))


def test_the_log_has_ever_fewer_of_the_times():
    it, told = displaced(), []
    for number in range(1, 100):
        it.next_wait()
        told += [number] if it.is_news else []
    assert told == [1, 2, 4, 8, 16, 32, 64]
