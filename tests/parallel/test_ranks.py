"""The ranks that stay: one function leaves nothing to the next one."""

import multiprocessing
import os
import random

import pytest
import torch
import torch.distributed as dist

from atoll.parallel import world
from atoll.parallel.engine.forked import RankFailed
from tests.parallel.ranks import RANKS, SHARED, Pool, call_on_ranks
from tests.waiting import BOUND_S

pytestmark = pytest.mark.real


def process_and_sum(value: float) -> tuple[int, float]:
    total = torch.tensor([value + dist.get_rank()])
    dist.all_reduce(total)
    return os.getpid(), total.item()


def changes() -> tuple[float, float, str, str, int]:
    """Return what a function finds, and change it."""
    found = (torch.rand(()).item(), random.random(), os.environ.get("LEFT", ""), os.getcwd(), len(os.environ))
    os.environ["LEFT"] = "here"
    os.chdir("/")
    torch.set_default_dtype(torch.float64)
    return found


def patches() -> float:
    before = world.TIMEOUT_S
    world.TIMEOUT_S = 1.0
    return before


def fails_on_one() -> None:
    if dist.get_rank() == 1:
        raise ValueError("the second rank")


def waits_in_vain() -> None:
    if dist.get_rank() == 0:
        dist.barrier()
    os._exit(7)


def test_the_same_processes_compute_in_groups_of_any_size() -> None:
    first = call_on_ranks(process_and_sum, 2, 1.0)
    second = call_on_ranks(process_and_sum, RANKS, 1.0)
    assert [pid for pid, _ in first] == [pid for pid, _ in second[:2]]
    assert {total for _, total in first} == {3.0}
    assert {total for _, total in second} == {10.0}


def test_what_a_function_changes_in_its_process_is_set_back() -> None:
    assert call_on_ranks(changes, 2) == call_on_ranks(changes, 2)


def test_a_process_with_a_patched_module_is_replaced() -> None:
    before = call_on_ranks(process_and_sum, 1, 0.0)
    [outcome] = SHARED.call(patches, 1)
    assert outcome.replaced == ("atoll.parallel.world.TIMEOUT_S",)
    assert call_on_ranks(patches, 1) == [outcome.value] == [world.TIMEOUT_S]
    assert call_on_ranks(process_and_sum, 1, 0.0)[0][0] != before[0][0]


def test_a_failure_has_its_traceback_and_the_next_call_other_processes() -> None:
    with pytest.raises(RankFailed, match=r"rank 1: (.|\n)*ValueError: the second rank"):
        call_on_ranks(fails_on_one, 2, timeout_s=BOUND_S)
    with pytest.raises(RankFailed, match="rank 1: died with exit code 7"):
        call_on_ranks(waits_in_vain, 2, timeout_s=BOUND_S)
    assert len(call_on_ranks(process_and_sum, 2, 1.0)) == 2


def test_processes_with_many_threads_are_replaced(monkeypatch: pytest.MonkeyPatch) -> None:
    pool = Pool()
    try:
        [one], [other] = pool.call(process_and_sum, 1, 0.0), pool.call(process_and_sum, 1, 0.0)
        assert one.value == other.value
        monkeypatch.setattr("tests.parallel.ranks.THREADS", 0)
        assert pool.call(process_and_sum, 1, 0.0)[0].value == one.value
        assert pool.call(process_and_sum, 1, 0.0)[0].value != one.value
    finally:
        pool.end()


def test_processes_that_another_test_has_killed_are_replaced() -> None:
    pool = Pool()
    try:
        [[pid, _], _] = [each.value for each in pool.call(process_and_sum, 2, 0.0)]
        [process] = [each for each in multiprocessing.active_children() if each.pid == pid]
        process.kill()
        process.join()
        assert pool.call(process_and_sum, 2, 0.0)[0].value[0] != pid
    finally:
        pool.end()
