"""A stream on which nothing comes is not kept for ever: it holds a file, and room that others need."""

import asyncio
from collections.abc import AsyncIterator, Awaitable
from typing import Any, TypeVar

import grpc

from atoll.protocol.wire.channel import CHUNK_BYTES
from atoll.server.transport.interceptor import Context

T = TypeVar("T")

SILENCE_S = 600.0
"""Seconds that a stream of the data plane may be silent."""

OPENING_S = 30.0
"""Seconds that a stream may take until its first message."""

PARTIALS_MAX = 2
"""Unfinished uploads of one client in a run; its oldest is forgotten when it begins one more."""

FLOOR_BYTES_PER_S = 16 * 1024

FLOOR_S = 30.0
"""An upload may be slower than the floor for so long; see `Patience`."""


class Silent(TimeoutError):
    """Nothing has come for too long."""


class Patience:
    """How long to wait for the next bytes of an upload.

    Every second of waiting is spent from `FLOOR_S` and a chunk's time at the floor, and every byte that comes earns
    1 / floor seconds back, never beyond that: so whoever sends at the floor or faster may go on for ever, also in
    single chunks of 1 MiB, and whoever is slower by any share is ended. Only waiting for the sender is spent: while
    this side writes to its disk, and the sender has no credit, nothing is.

    Args:
        floor: bytes a second; 0: whoever sends at all within `silence` [s] may go on.
        silence: the longest single wait.
    """

    def __init__(self, floor: float, silence: float) -> None:
        self.floor, self._silence = floor, silence
        self.most = FLOOR_S + CHUNK_BYTES / floor if floor else silence
        self._left = self.most

    @property
    def left(self) -> float:
        """Seconds that may be waited now."""
        return min(max(0.0, self._left), self._silence)

    def received(self, num_bytes: int, waited: float) -> None:
        """Bytes came after a wait [s]."""
        if self.floor:
            self._left = min(self.most, self._left - waited + num_bytes / self.floor)


async def in_time(what: Awaitable[T]) -> T:
    """Wait for something that the client has to do.

    Raises:
        Silent: it did not do it.
    """
    return await _within(SILENCE_S, what)


async def first_of(messages: AsyncIterator[T]) -> T | None:
    """The first message; None when the client has ended its side. Raises Silent."""
    return await _within(min(OPENING_S, SILENCE_S), anext(messages, None))


async def next_bytes(messages: AsyncIterator[T], patience: Patience) -> tuple[T | None, float]:
    """The next message, and how long it was waited for [s]; None when the client has ended its side.

    Raises:
        Silent: it did not come while there was patience.
    """
    loop = asyncio.get_running_loop()
    begun = loop.time()
    try:
        async with asyncio.timeout(patience.left):
            return await anext(messages, None), loop.time() - begun
    except TimeoutError:
        waited = loop.time() - begun
        what = f"nothing came for {waited:.0f} s"
        if patience.floor:
            what = f"fewer than {patience.floor:g} bytes a second came, for more than {patience.most:.0f} s of waiting"
        raise Silent(f"{what}: connect again, and go on") from None


def patience_of(floor: float) -> Patience:
    """With an upload that begins now [bytes/s]."""
    return Patience(floor, SILENCE_S)


async def _within(seconds: float, what: Awaitable[T]) -> T:
    try:
        async with asyncio.timeout(seconds):
            return await what
    except TimeoutError:
        raise Silent(f"nothing came for {seconds:g} s: connect again, and go on") from None


async def opening(requests: AsyncIterator[Any], context: Context, kind: str) -> Any:
    """The first message of the data plane's streams, or the end of the call."""
    try:
        first = await first_of(requests)
    except Silent as error:
        await context.abort(grpc.StatusCode.DEADLINE_EXCEEDED, str(error))
    if first is None or first.WhichOneof("request") != "open":
        await context.abort(grpc.StatusCode.INVALID_ARGUMENT, f"the first message must be {kind}")
    return first
