"""Threads that several runs share."""

import threading
from concurrent.futures import CancelledError

import pytest
from hypothesis import given
from hypothesis import strategies as st

from atoll.server.hosting.fair_executor import Turns


def blocked(turns):
    """Keep the only thread busy until the event is set."""
    go, has_begun = threading.Event(), threading.Event()

    def wait():
        has_begun.set()
        go.wait(10)

    turns.of("busy").submit(wait)
    assert has_begun.wait(10)
    return go


@given(st.lists(st.sampled_from("abc"), max_size=20))
def test_work_that_waits_is_done_in_turn_and_in_order(owners):
    turns, done = Turns(1, "test"), []
    go = blocked(turns)
    futures = [turns.of(owner).submit(done.append, (owner, k)) for k, owner in enumerate(owners)]
    go.set()
    for future in futures:
        future.result(10)
    turns.shutdown()
    queues = {owner: [k for k, o in enumerate(owners) if o == owner] for owner in dict.fromkeys(owners)}
    in_turn = []
    while queues:
        for owner in [*queues]:
            in_turn.append((owner, queues[owner].pop(0)))
            if not queues[owner]:
                del queues[owner]
    assert done == in_turn


def test_one_who_hands_in_a_hundred_pieces_keeps_another_waiting_for_one():
    turns, done = Turns(1, "test"), []
    go = blocked(turns)
    for k in range(100):
        turns.of("large").submit(done.append, k)
    small = turns.of("small").submit(lambda: len(done))
    go.set()
    assert small.result(10) == 1
    turns.shutdown()


def test_what_fails_is_told_to_whoever_handed_it_in_and_others_go_on():
    turns = Turns(1, "test")
    failed = turns.of("a").submit(int, "no number")
    assert turns.of("b").submit(int, "7").result(10) == 7
    with pytest.raises(ValueError, match="no number"):
        failed.result(10)
    turns.shutdown()


def test_an_end_cancels_what_has_not_begun():
    turns = Turns(1, "test")
    go = blocked(turns)
    waiting = turns.of("a").submit(int, "7")
    ending = threading.Thread(target=turns.shutdown)
    ending.start()
    with pytest.raises(CancelledError):
        waiting.result(10)
    go.set()
    ending.join(10)
    with pytest.raises(RuntimeError):
        turns.of("a").submit(int, "7")


def test_what_is_handed_in_while_the_threads_end_is_refused_and_never_forgotten():
    """Whoever hears that his work is cancelled may have more: it would wait for ever, and so would he."""
    turns = Turns(1, "test")
    go, more = blocked(turns), []

    def hand_in_more(_):
        with pytest.raises(RuntimeError, match="the process ends"):
            turns.of("a").submit(int, "8")
        more.append("refused")

    turns.of("a").submit(int, "7").add_done_callback(hand_in_more)
    ending = threading.Thread(target=turns.shutdown)
    ending.start()
    go.set()
    ending.join(10)
    assert more == ["refused"]
