"""Work on what a stream brings, on a thread behind the loop that receives: while it goes on, more is received.

One hand-off to a thread costs a tenth of a millisecond and more; a transfer that pays it for every chunk, and waits for
the work on one chunk before it takes the next, is slower by half. Here all that has come meanwhile goes over at once.
"""

import asyncio
from collections.abc import Callable, Sequence
from concurrent.futures import Executor

from atoll.protocol.wire.bulk_messages import Buffer

WAITING_BYTES_MAX = 1 << 20
"""What may wait for the thread, unless less is said; whoever brings more waits."""


class Behind:
    """In order, one thread at a time; what waits is bounded.

    Args:
        work: on some buffers, one after the other; not on the loop's thread.
        executor: whose threads; None: the loop's own.
    """

    def __init__(self, work: Callable[[Sequence[Buffer]], None], executor: Executor | None = None) -> None:
        self._work, self._executor = work, executor
        self._waiting: list[Buffer] = []
        self._waiting_bytes = 0
        self._running: asyncio.Future[None] | None = None
        self._error: BaseException | None = None

    async def put(self, data: Buffer, waiting_max: int = WAITING_BYTES_MAX) -> None:
        """Hand over bytes; waits while more than so many bytes do.

        Raises:
            BaseException: what the work raised; CancelledError when the threads have ended. Nothing is worked on
                after that, for it would lie behind a hole.
        """
        self._raise()
        self._waiting.append(data)
        self._waiting_bytes += len(data)
        self._go_on()
        while self._running is not None and self._waiting_bytes > waiting_max:
            await asyncio.wait({self._running})
        self._raise()

    async def finish(self) -> None:
        """Wait until all is done; raises as `put`. Also when this task is cancelled it returns only then."""
        cancelled: asyncio.CancelledError | None = None
        while self._running is not None:
            try:
                await asyncio.wait({self._running})
            except asyncio.CancelledError as error:
                cancelled = error
        if cancelled is not None:
            raise cancelled
        self._raise()

    def _go_on(self) -> None:
        if self._running is not None or not self._waiting or self._error is not None:
            return
        batch, self._waiting, self._waiting_bytes = self._waiting, [], 0
        try:
            running = asyncio.get_running_loop().run_in_executor(self._executor, self._work, batch)
        except RuntimeError as error:
            self._error = asyncio.CancelledError(str(error))
            return
        self._running = running
        running.add_done_callback(self._ended)

    def _ended(self, running: "asyncio.Future[None]") -> None:
        self._running = None
        self._error = asyncio.CancelledError() if running.cancelled() else running.exception()
        self._go_on()

    def _raise(self) -> None:
        if self._error is not None:
            raise self._error
