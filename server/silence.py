"""A stream on which nothing comes is not kept for ever: it holds a file, and room that others need."""

import asyncio
from collections.abc import AsyncIterator, Awaitable
from typing import TypeVar

from atoll.server.limits import Patience

T = TypeVar("T")

SILENCE_S = 600.0
"""Seconds that a stream of the data plane may be silent."""

OPENING_S = 30.0
"""Seconds that a stream may take until its first message."""


class Silent(TimeoutError):
    """Nothing has come for too long."""


async def in_time(what: Awaitable[T]) -> T:
    """Wait for something that the client has to do.

    Raises:
        Silent: it did not do it.
    """
    return await _within(SILENCE_S, what)


async def next_of(messages: AsyncIterator[T]) -> T | None:
    """The next message; None when the client has ended its side. Raises Silent."""
    return await in_time(anext(messages, None))


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
