"""Work that blocks: what is begun is always waited for."""

import asyncio
import threading
from functools import partial

import pytest

from atoll.protocol.threads import on_own_thread, on_thread
from tests.client.fake_coordinator import live
from tests.waiting import BOUND_S


@pytest.mark.real
@live
async def test_who_is_cancelled_again_and_again_returns_only_when_the_work_has_ended():
    begun, may_end = threading.Event(), threading.Event()
    task = asyncio.ensure_future(on_thread(None, lambda: (begun.set(), may_end.wait())))
    while not begun.is_set():
        await asyncio.sleep(0.005)
    for _ in range(3):
        task.cancel()
        await asyncio.sleep(0.02)
        assert not task.done()
    may_end.set()
    with pytest.raises(asyncio.CancelledError):
        await task


@live
async def test_work_on_threads_of_its_own_does_not_wait_for_any_other():
    together = threading.Barrier(50, timeout=BOUND_S)
    await asyncio.gather(*(on_own_thread(together.wait, stop=together.abort) for _ in range(50)))


@pytest.mark.real
@live
async def test_work_on_a_thread_of_its_own_is_stopped_when_its_task_is_cancelled():
    may_end = threading.Event()
    task = asyncio.ensure_future(on_own_thread(may_end.wait, stop=may_end.set))
    await asyncio.sleep(0.02)
    task.cancel()
    with pytest.raises(asyncio.CancelledError):
        await task
    assert may_end.is_set()


@live
async def test_what_the_work_raises_comes_back():
    for run in (partial(on_thread, None), lambda work: on_own_thread(work, stop=lambda: None)):
        with pytest.raises(ZeroDivisionError):
            await run(lambda: 1 // 0)
