"""The ranks that stay: one function leaves nothing to the next one."""

import ctypes
import multiprocessing
import os
import random
import time
import weakref
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard

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


def reads_nothing() -> None:
    if dist.get_rank() == 1:
        ctypes.string_at(0)
    dist.barrier()


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
    with pytest.raises(RankFailed, match=r"rank 1: died with exit code -11\n(.|\n)*in reads_nothing"):
        call_on_ranks(reads_nothing, 2, timeout_s=BOUND_S)
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


def test_a_fork_that_ends_leaves_the_ranks_and_their_folder() -> None:
    before = call_on_ranks(process_and_sum, 2, 1.0)
    if not (child := os.fork()):
        SHARED.end()
        getattr(weakref.finalize, "_exitfunc")()  # noqa: B009 - as at the end of the interpreter
        os._exit(0)
    assert os.waitpid(child, 0)[1] == 0
    assert call_on_ranks(process_and_sum, 2, 1.0) == before


def state_of(pid: int) -> str:
    return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0]


def test_ranks_are_stopped_between_two_calls_and_keep_no_thread_of_a_mesh() -> None:
    pool = Pool()
    try:
        pids = [each.value for each in pool.call(sharded, 2)]
        until = time.monotonic() + BOUND_S
        while {state_of(pid) for pid in pids} != {"T"}:
            assert time.monotonic() < until
        threads = [[each.threads for each in pool.call(sharded, 2)] for _ in range(3)]
        assert threads[0] == threads[-1]
        assert [each.value for each in pool.call(sharded, 2)] == pids
    finally:
        pool.end()


def sharded() -> int:
    """Train a step of a sharded layer; return the process."""
    model = fully_shard(torch.nn.Linear(4, 4), mesh=init_device_mesh("cpu", (2,)))
    model(torch.ones(2, 4)).sum().backward()
    torch.optim.SGD(model.parameters(), lr=0.1).step()
    return os.getpid()
