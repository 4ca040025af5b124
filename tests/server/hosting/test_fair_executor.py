"""The thread pool that several runs share, and its turns."""

import threading
from concurrent.futures import CancelledError

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from atoll.server.hosting.fair_executor import FairExecutor
from tests.waiting import BOUND_S


def blocked(pool):
    """Block the only thread until the returned event is set."""
    go, has_begun = threading.Event(), threading.Event()

    def wait():
        has_begun.set()
        go.wait(BOUND_S)

    pool.of("busy").submit(wait)
    assert has_begun.wait(BOUND_S)
    return go


@settings(deadline=None)
@given(st.lists(st.sampled_from("abc"), max_size=20))
def test_work_that_waits_is_done_in_turn_and_in_order(owners):
    pool, done = FairExecutor(1, "test"), []
    go = blocked(pool)
    futures = [pool.of(owner).submit(done.append, (owner, k)) for k, owner in enumerate(owners)]
    go.set()
    for future in futures:
        future.result(BOUND_S)
    pool.shutdown()
    queues = {owner: [k for k, o in enumerate(owners) if o == owner] for owner in dict.fromkeys(owners)}
    in_turn = []
    while queues:
        for owner in [*queues]:
            in_turn.append((owner, queues[owner].pop(0)))
            if not queues[owner]:
                del queues[owner]
    assert done == in_turn


def test_an_owner_with_a_hundred_items_delays_another_by_one():
    pool, done = FairExecutor(1, "test"), []
    go = blocked(pool)
    for k in range(100):
        pool.of("large").submit(done.append, k)
    small = pool.of("small").submit(lambda: len(done))
    go.set()
    assert small.result(BOUND_S) == 1
    pool.shutdown()


def test_a_failure_reaches_its_submitter_and_others_go_on():
    pool = FairExecutor(1, "test")
    failed = pool.of("a").submit(int, "no number")
    assert pool.of("b").submit(int, "7").result(BOUND_S) == 7
    with pytest.raises(ValueError, match="no number"):
        failed.result(BOUND_S)
    pool.shutdown()


def test_shutdown_cancels_work_that_has_not_begun():
    pool = FairExecutor(1, "test")
    go = blocked(pool)
    waiting = pool.of("a").submit(int, "7")
    ending = threading.Thread(target=pool.shutdown)
    ending.start()
    with pytest.raises(CancelledError):
        waiting.result(BOUND_S)
    go.set()
    ending.join(BOUND_S)
    with pytest.raises(RuntimeError):
        pool.of("a").submit(int, "7")


def test_work_submitted_during_shutdown_is_refused_and_never_forgotten():
    """A callback of cancelled work may submit more, which would otherwise wait for ever, and its submitter with it."""
    pool = FairExecutor(1, "test")
    go, more = blocked(pool), []

    def hand_in_more(_):
        with pytest.raises(RuntimeError, match="the process ends"):
            pool.of("a").submit(int, "8")
        more.append("refused")

    pool.of("a").submit(int, "7").add_done_callback(hand_in_more)
    ending = threading.Thread(target=pool.shutdown)
    ending.start()
    go.set()
    ending.join(BOUND_S)
    assert more == ["refused"]
