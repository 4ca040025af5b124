"""The number of files that a process may have open, and the memory that cycles keep."""

import asyncio
import gc
import resource
import weakref

from atoll.server.process_tuning import allow_open_files, collect_regularly, collect_seldom


def test_as_many_files_may_be_open_as_the_system_allows():
    before = soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    try:
        resource.setrlimit(resource.RLIMIT_NOFILE, (soft - 1 if soft > 0 else 4096, hard))  # not above 0: no limit
        allow_open_files()
        assert resource.getrlimit(resource.RLIMIT_NOFILE) == (hard, hard)
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, before)


class Cycle:
    def __init__(self) -> None:
        self.itself = self


async def _freed(times: int) -> None:
    for _ in range(times):
        freed = asyncio.Event()
        weakref.finalize(Cycle(), freed.set)
        await asyncio.wait_for(freed.wait(), timeout=60)


def test_young_cycles_are_freed_although_few_objects_are_made():
    async def collected() -> None:
        collect_seldom()
        collect_regularly(0.01)
        await _freed(3)  # also those that come after a collection

    before = gc.get_threshold()
    try:
        asyncio.run(collected())
    finally:
        gc.set_threshold(*before)
