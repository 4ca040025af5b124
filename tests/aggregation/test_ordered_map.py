"""Work ahead on threads: in order, bounded, and over when it is closed."""

import threading
import time
from contextlib import closing
from functools import partial

import pytest

from atoll.aggregation.ordered_map import computed_ahead


@pytest.mark.real
@pytest.mark.parametrize("threads", [1, 2, 5])
def test_results_come_in_the_order_of_the_jobs(threads):
    jobs = [(k, partial(lambda k: time.sleep(0.001 * (k % 3)) or k * k, k)) for k in range(30)]
    with closing(computed_ahead(jobs, threads=threads)) as finished:
        assert list(finished) == [(k, k * k) for k in range(30)]


def test_no_more_than_two_for_each_thread_are_ahead():
    asked = []

    def jobs():
        for k in range(20):
            asked.append(k)
            yield k, lambda: None

    with closing(computed_ahead(jobs(), threads=3)) as finished:
        for taken, _ in enumerate(finished, start=1):
            assert len(asked) <= taken + 2 * 3
    assert len(asked) == 20


@pytest.mark.real
def test_nothing_runs_after_it_was_closed():
    running, lock = [0], threading.Lock()

    def job():
        with lock:
            running[0] += 1
        time.sleep(0.02)
        with lock:
            running[0] -= 1

    with closing(computed_ahead([(None, job)] * 50, threads=4)) as finished:
        next(finished)
    assert running == [0]


def test_what_a_job_raises_comes_out_in_its_place():
    def job(k):
        if k == 2:
            raise ValueError("two")
        return k

    with closing(computed_ahead(((k, partial(job, k)) for k in range(9)), threads=2)) as finished:
        assert [next(finished)[1], next(finished)[1]] == [0, 1]
        with pytest.raises(ValueError, match="two"):
            next(finished)
