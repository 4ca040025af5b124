"""The timeouts of streams: a silent stream is ended, because it holds a file and a slot that others need."""

import asyncio
from collections.abc import AsyncIterator, Awaitable
from typing import Any, TypeVar

import grpc

from atoll.protocol.wire.channel import CHUNK_BYTES
from atoll.server.transport.interceptor import Context

T = TypeVar("T")

SILENCE_S = 600.0
"""Time for which a stream of the data plane may be silent [s]."""

OPENING_S = 30.0
"""Time that a stream may take until its first message [s]."""

PARTIALS_MAX = 2
"""Number of partial uploads of one client in a run; one more discards the oldest."""

FLOOR_BYTES_PER_S = 16 * 1024
"""Default speed below which an upload is ended [bytes/s]."""

FLOOR_S = 30.0
"""Time for which an upload may be slower than the floor [s]; see `Patience`."""


class Silent(TimeoutError):
    """Error: a stream timed out because nothing arrived."""


class Patience:
    """Time to wait for the next bytes of an upload, computed with a token bucket.

    The bucket holds at most FLOOR_S + CHUNK_BYTES / floor seconds. Waiting spends them, and each received byte earns 1
    / floor seconds. So an upload at the floor or faster may continue without limit, even in single chunks of 1 MiB, and
    a slower one is eventually ended. Only waiting for the sender is spent, not the time in which this side writes to
    its disk and the sender has no credit.

    Args:
        floor: the speed below which an upload is ended [bytes/s]; 0: only `silence` limits it.
        silence: the longest single wait [s].
    """

    def __init__(self, floor: float, silence: float) -> None:
        self.floor, self._silence = floor, silence
        self.most = FLOOR_S + CHUNK_BYTES / floor if floor else silence
        self._left = self.most

    @property
    def left(self) -> float:
        """Time that the next wait may take [s]."""
        return min(max(0.0, self._left), self._silence)

    def received(self, num_bytes: int, waited: float) -> None:
        """Account for `num_bytes` that arrived after a wait of `waited` [s]."""
        if self.floor:
            self._left = min(self.most, self._left - waited + num_bytes / self.floor)


async def in_time(what: Awaitable[T]) -> T:
    """Wait at most SILENCE_S for an action of the client.

    Raises:
        Silent: it did not happen.
    """
    return await _within(SILENCE_S, what)


async def first_of(messages: AsyncIterator[T]) -> T | None:
    """Return the first message of a stream; None if the client has ended its side.

    Raises:
        Silent: no message arrived within OPENING_S.
    """
    return await _within(min(OPENING_S, SILENCE_S), anext(messages, None))


async def next_bytes(messages: AsyncIterator[T], patience: Patience) -> tuple[T | None, float]:
    """Return the next message, None if the client has ended its side, and the time waited for it [s].

    Raises:
        Silent: it did not arrive before the patience was spent.
    """
    loop = asyncio.get_running_loop()
    begun = loop.time()
    try:
        async with asyncio.timeout(patience.left):
            return await anext(messages, None), loop.time() - begun
    except TimeoutError:
        waited = loop.time() - begun
        what = f"nothing arrived for {waited:.0f} s"
        if patience.floor:
            what = f"fewer than {patience.floor:g} bytes a second arrived in over {patience.most:.0f} s of waiting"
        raise Silent(f"{what}: connect again and continue") from None


def patience_of(floor: float) -> Patience:
    """Return the patience with an upload that begins now, for a floor in bytes/s."""
    return Patience(floor, SILENCE_S)


async def _within(seconds: float, what: Awaitable[T]) -> T:
    try:
        async with asyncio.timeout(seconds):
            return await what
    except TimeoutError:
        raise Silent(f"nothing arrived for {seconds:g} s: connect again and continue") from None


async def opening(requests: AsyncIterator[Any], context: Context, kind: str) -> Any:
    """Return the first message of a stream of the data plane; abort the call if it is late or of another kind."""
    try:
        first = await first_of(requests)
    except Silent as error:
        await context.abort(grpc.StatusCode.DEADLINE_EXCEEDED, str(error))
    if first is None or first.WhichOneof("request") != "open":
        await context.abort(grpc.StatusCode.INVALID_ARGUMENT, f"the first message must be {kind}")
    return first
