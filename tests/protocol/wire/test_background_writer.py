import asyncio
import threading
from concurrent.futures import ThreadPoolExecutor

import pytest

from atoll.protocol.wire.background_writer import WAITING_BYTES_MAX, Behind
from tests.waiting import BOUND_S

PART = bytes(WAITING_BYTES_MAX // 4)


class Work:
    """Work that records its buffers and continues only when the test lets it."""

    def __init__(self, fails_at=None):
        self.batches, self.may_go_on, self.fails_at = [], threading.Semaphore(0), fails_at

    def __call__(self, batch):
        assert self.may_go_on.acquire(timeout=BOUND_S)
        self.batches.append([bytes(data[:1]) for data in batch])
        if len(self.batches) == self.fails_at:
            raise OSError("no room")

    def go_on(self, times=1):
        self.may_go_on.release(times)


def run(test):
    asyncio.run(asyncio.wait_for(test, BOUND_S))


def test_all_is_done_in_order_and_what_came_meanwhile_goes_over_at_once():
    async def main():
        work = Work()
        behind = Behind(work)
        for number in range(4):
            await behind.put(bytes([number]))
        work.go_on(2)
        await behind.finish()
        assert work.batches == [[b"\0"], [b"\1", b"\2", b"\3"]]
        work.go_on()
        await behind.put(b"x")
        await behind.finish()
        assert work.batches[2:] == [[b"x"]]

    run(main())


@pytest.mark.parametrize("waiting", [4, 2, 0])
def test_what_waits_is_bounded(waiting):
    async def main():
        work = Work()
        behind = Behind(work)
        bound = (waiting * len(PART),) if waiting < 4 else ()
        for _ in range(1 + waiting):  # one is worked on, and the others wait
            await behind.put(PART, *bound)
        another = asyncio.ensure_future(behind.put(PART, *bound))
        await asyncio.sleep(0)
        await asyncio.sleep(0)
        assert not another.done()
        work.go_on()
        await another
        work.go_on(2)
        await behind.finish()
        assert [len(batch) for batch in work.batches] == [1, 1 + waiting]

    run(main())


def test_what_the_work_raises_is_told_and_nothing_is_worked_on_after_it():
    async def main():
        work = Work(fails_at=1)
        behind = Behind(work)
        await behind.put(b"a")
        await behind.put(b"b")
        work.go_on(2)
        with pytest.raises(OSError, match="no room"):
            await behind.finish()
        with pytest.raises(OSError, match="no room"):
            await behind.put(b"c")
        assert work.batches == [[b"a"]]

    run(main())


def test_a_cancelled_transfer_ends_when_its_work_has():
    async def main():
        work = Work()
        behind = Behind(work)
        await behind.put(b"a")
        await behind.put(b"b")
        finishing = asyncio.ensure_future(behind.finish())
        await asyncio.sleep(0)
        finishing.cancel()
        await asyncio.sleep(0)
        assert not finishing.done()
        work.go_on(2)
        with pytest.raises(asyncio.CancelledError):
            await finishing
        assert work.batches == [[b"a"], [b"b"]]

    run(main())


def test_when_the_threads_end_nothing_is_worked_on_behind_what_was_not():
    async def main():
        work, threads = Work(), ThreadPoolExecutor(1)
        behind = Behind(work, threads)
        busy = threads.submit(work.may_go_on.acquire)
        await behind.put(b"a")
        await behind.put(b"b")
        threads.shutdown(wait=False, cancel_futures=True)
        for again in (behind.finish(), behind.put(b"c")):
            with pytest.raises(asyncio.CancelledError):
                await again
        work.go_on()
        assert busy.result(20)
        assert work.batches == []

    run(main())
