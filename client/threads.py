"""Work that blocks, off the event loop."""

import asyncio
from collections.abc import Callable
from concurrent.futures import Executor, ThreadPoolExecutor
from typing import TypeVar

T = TypeVar("T")

INLINE_BYTES = 128 * 1024
"""Reading, hashing or writing this much is quicker than handing it to a thread."""


async def on_thread(function: Callable[..., T], *args: object) -> T:
    """Run on a thread. Also when this task is cancelled it returns only after the function has: no work runs astray."""
    return await _on(None, function, *args, stop=lambda: None)


async def on_own_thread(function: Callable[..., T], *args: object, stop: Callable[[], object]) -> T:
    """The same on a thread that nobody else waits for, as what a network decides must be: it may take for ever.

    Args:
        stop: lets the function end soon; called when this task is cancelled.
    """
    executor = ThreadPoolExecutor(max_workers=1, thread_name_prefix=function.__name__)
    try:
        return await _on(executor, function, *args, stop=stop)
    finally:
        executor.shutdown(wait=False)


async def _on(executor: Executor | None, function: Callable[..., T], *args: object, stop: Callable[[], object]) -> T:
    future = asyncio.get_running_loop().run_in_executor(executor, function, *args)
    future.add_done_callback(lambda ended: ended.cancelled() or ended.exception())  # it may have nobody to tell
    cancelled: asyncio.CancelledError | None = None
    while not future.done():
        try:
            await asyncio.wait({future})
        except asyncio.CancelledError as error:
            cancelled = error
            stop()
    if cancelled is not None:
        raise cancelled
    return future.result()


async def off_loop(num_bytes: int, function: Callable[..., T], *args: object) -> T:
    """Run at once when it is about few bytes, on a thread otherwise."""
    return function(*args) if num_bytes <= INLINE_BYTES else await on_thread(function, *args)
