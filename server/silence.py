"""A stream on which nothing comes is not kept for ever: it holds a file, and room that others need."""

import asyncio
from collections.abc import AsyncIterator, Awaitable
from typing import TypeVar

T = TypeVar("T")

SILENCE_S = 600.0
"""Seconds that a stream of the data plane, or one without Hello, may be silent: a chunk at 2 kB/s takes as long."""


class Silent(TimeoutError):
    """Nothing has come for too long."""


async def in_time(what: Awaitable[T]) -> T:
    """Wait for something that the client has to do.

    Raises:
        Silent: it did not do it.
    """
    try:
        async with asyncio.timeout(SILENCE_S):
            return await what
    except TimeoutError:
        raise Silent(f"nothing came for {SILENCE_S:g} s: connect again, and go on") from None


async def next_of(messages: AsyncIterator[T]) -> T | None:
    """The next message; None when the client has ended its side. Raises Silent."""
    return await in_time(anext(messages, None))
