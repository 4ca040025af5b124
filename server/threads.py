"""Work that blocks, off the event loop."""

import asyncio
import threading
from collections.abc import Callable
from concurrent.futures import Executor
from contextlib import suppress
from functools import partial
from typing import TypeVar

T = TypeVar("T")

INLINE_BYTES = 128 * 1024
"""Reading, writing or parsing this much is quicker than handing it to a thread."""


async def on_thread(executor: Executor | None, function: Callable[..., T], *args: object) -> T:
    """Run on a thread of `executor`; None: of the loop's own.

    Also when this task is cancelled it returns only after the function has: no work on a file runs astray.
    """
    future = asyncio.get_running_loop().run_in_executor(executor, function, *args)
    future.add_done_callback(lambda ended: ended.cancelled() or ended.exception())  # it may have nobody to tell
    try:
        await asyncio.wait({future})
    except asyncio.CancelledError:
        await asyncio.wait({future})
        raise
    return future.result()


async def off_loop(num_bytes: int, function: Callable[..., T], *args: object) -> T:
    """Run at once when it is about few bytes, on a thread otherwise."""
    return function(*args) if num_bytes <= INLINE_BYTES else await on_thread(None, function, *args)


def on_thread_of_its_own(function: Callable[[], T]) -> "asyncio.Future[T]":
    """Run user code that may never return: it takes no thread from others, and the process ends without it."""
    loop = asyncio.get_running_loop()
    future: asyncio.Future[T] = loop.create_future()

    def settle(result: Callable[[], None]) -> None:
        if not future.done():
            result()

    def work() -> None:
        try:
            outcome = partial(future.set_result, function())
        except Exception as error:
            outcome = partial(future.set_exception, error)
        with suppress(RuntimeError):  # the loop has ended meanwhile
            loop.call_soon_threadsafe(settle, outcome)

    threading.Thread(target=work, name="user code", daemon=True).start()
    return future
