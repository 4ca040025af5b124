"""Work that blocks, off the event loop."""

import asyncio
from collections.abc import Callable
from typing import TypeVar

T = TypeVar("T")

INLINE_BYTES = 128 * 1024
"""Reading, hashing or writing this much is quicker than handing it to a thread."""


async def on_thread(function: Callable[..., T], *args: object) -> T:
    """Run on a thread. Also when this task is cancelled it returns only after the function has: no work runs astray."""
    future = asyncio.get_running_loop().run_in_executor(None, function, *args)
    future.add_done_callback(lambda ended: ended.cancelled() or ended.exception())  # it may have nobody to tell
    try:
        await asyncio.wait({future})
    except asyncio.CancelledError:
        await asyncio.wait({future})
        raise
    return future.result()


async def off_loop(num_bytes: int, function: Callable[..., T], *args: object) -> T:
    """Run at once when it is about few bytes, on a thread otherwise."""
    return function(*args) if num_bytes <= INLINE_BYTES else await on_thread(function, *args)
