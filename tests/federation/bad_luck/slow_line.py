"""A slow line between processes of one machine, on a thread of a test: `drills.line`, to be held by the test."""

import asyncio
import threading
from types import TracebackType

from atoll.drills.line import Line
from atoll.drills.troubles import Troubles
from atoll.protocol.wire.channel import parse_address


class SlowLine:
    """The line to an address, with the same rate in each direction, shared by all connections.

    Args:
        target: host:port at the far end.
        rate: bytes a second.
        delay: seconds in each direction.
    """

    def __init__(self, target: str, rate: float, delay: float = 0.1) -> None:
        self._line = Line(parse_address(target), Troubles(rate=rate, latency_s=delay))
        self._listening = self._line.listening("127.0.0.1", 0)
        self.address = f"127.0.0.1:{self._listening.getsockname()[1]}"
        self._thread = threading.Thread(target=lambda: asyncio.run(self._serve()), daemon=True)
        self._begun = threading.Event()

    @property
    def is_cut(self) -> bool:
        """Whether nothing passes, and no end is told."""
        return self._line.is_held

    @is_cut.setter
    def is_cut(self, is_cut: bool) -> None:
        self._line.is_held = is_cut

    def __enter__(self) -> "SlowLine":
        self._thread.start()
        self._begun.wait()
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, at: TracebackType | None) -> None:
        self._loop.call_soon_threadsafe(self._over.set)
        self._thread.join()

    async def _serve(self) -> None:
        self._loop, self._over = asyncio.get_running_loop(), asyncio.Event()
        serving = asyncio.create_task(self._line.serve(self._listening))
        self._begun.set()
        await self._over.wait()
        serving.cancel()
        await asyncio.gather(serving, return_exceptions=True)
