"""The background processing of a stream's bytes: a thread processes them while the event loop receives the next ones.

Handing work to a thread costs a tenth of a millisecond or more; a transfer that pays this for every chunk, and
processes each chunk before it receives the next, is slower by half. Here all chunks that have arrived meanwhile are
handed over at once.
"""

import asyncio
from collections.abc import Callable, Sequence
from concurrent.futures import Executor

from atoll.protocol.threads import begin_on_thread
from atoll.protocol.wire.bulk_messages import Buffer

WAITING_BYTES_MAX = 1 << 20
"""Default bound of the bytes that wait for the thread; above it `put` waits (back-pressure)."""


class Behind:
    """Processor of buffers in their order, on one thread at a time, with a bounded queue.

    Args:
        work: processes some buffers, one after the other; runs on a thread.
        executor: provides the threads; None: the event loop's.
    """

    def __init__(self, work: Callable[[Sequence[Buffer]], None], executor: Executor | None = None) -> None:
        self._work, self._executor = work, executor
        self._waiting: list[Buffer] = []
        self._waiting_bytes = 0
        self._running: asyncio.Future[None] | None = None
        self._error: BaseException | None = None

    async def put(self, data: Buffer, waiting_max: int = WAITING_BYTES_MAX) -> None:
        """Queue bytes, and wait while more than `waiting_max` bytes are queued.

        Raises:
            BaseException: the error of the work; CancelledError when the executor has shut down. No further buffer is
                processed after that, because an earlier one is missing.
        """
        self._raise_error()
        self._waiting.append(data)
        self._waiting_bytes += len(data)
        self._start()
        while self._running is not None and self._waiting_bytes > waiting_max:
            await asyncio.wait({self._running})
        self._raise_error()

    async def finish(self) -> None:
        """Wait until all buffers are processed, even if this task is cancelled; raises the errors of `put`."""
        cancelled: asyncio.CancelledError | None = None
        while self._running is not None:
            try:
                await asyncio.wait({self._running})
            except asyncio.CancelledError as error:
                cancelled = error
        if cancelled is not None:
            raise cancelled
        self._raise_error()

    def _start(self) -> None:
        if self._running is not None or not self._waiting or self._error is not None:
            return
        batch, self._waiting, self._waiting_bytes = self._waiting, [], 0
        try:
            running = begin_on_thread(self._executor, self._work, batch)
        except RuntimeError as error:
            self._error = asyncio.CancelledError(str(error))
            return
        self._running = running
        running.add_done_callback(self._ended)

    def _ended(self, running: "asyncio.Future[None]") -> None:
        self._running = None
        self._error = asyncio.CancelledError() if running.cancelled() else running.exception()
        self._start()

    def _raise_error(self) -> None:
        if self._error is not None:
            raise self._error
