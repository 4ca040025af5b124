"""The ways to run blocking work off the event loop: a pool, a separate thread, a daemon thread for user code."""

import asyncio
import threading
from collections.abc import Callable
from concurrent.futures import Executor, ThreadPoolExecutor
from contextlib import suppress
from contextvars import copy_context
from functools import partial
from typing import TypeVar

T = TypeVar("T")

INLINE_BYTES = 128 * 1024
"""Size up to which reading, hashing, writing or parsing is faster than handing it to a thread [bytes]."""


async def on_thread(executor: Executor | None, function: Callable[..., T], *args: object) -> T:
    """Run a function on a thread of `executor`; None: of the event loop's pool.

    Even a cancelled task returns only after the function has, so no work on a file continues unnoticed.
    """
    return await _on(executor, function, *args, stop=lambda: None)


def begin_on_thread(executor: Executor | None, function: Callable[..., T], *args: object) -> "asyncio.Future[T]":
    """Start a function on a thread, as `on_thread` does, and return its future; a cancelled task does not wait for it.

    Raises:
        RuntimeError: the executor is shut down.
    """
    return asyncio.get_running_loop().run_in_executor(executor, copy_context().run, function, *args)


async def on_own_thread(function: Callable[..., T], *args: object, stop: Callable[[], object]) -> T:
    """Run a function on a new thread that no other work waits for, for example to read from a network.

    Args:
        function: as for `on_thread`.
        args: the arguments of the function.
        stop: lets the function end soon; called when this task is cancelled.
    """
    executor = ThreadPoolExecutor(max_workers=1, thread_name_prefix=function.__name__)
    try:
        return await _on(executor, function, *args, stop=stop)
    finally:
        executor.shutdown(wait=False)


async def off_loop(num_bytes: int, function: Callable[..., T], *args: object) -> T:
    """Run a function inline if it concerns at most `INLINE_BYTES`, else on a thread."""
    return function(*args) if num_bytes <= INLINE_BYTES else await on_thread(None, function, *args)


def on_daemon_thread(function: Callable[[], T]) -> "asyncio.Future[T]":
    """Run user code that may never return on a new daemon thread: it blocks no pool and no exit of the process."""
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
        with suppress(RuntimeError):  # the loop has ended
            loop.call_soon_threadsafe(settle, outcome)

    threading.Thread(target=work, name="user code", daemon=True).start()
    return future


async def _on(executor: Executor | None, function: Callable[..., T], *args: object, stop: Callable[[], object]) -> T:
    future = begin_on_thread(executor, function, *args)
    future.add_done_callback(lambda ended: ended.cancelled() or ended.exception())  # in case nothing awaits it
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
