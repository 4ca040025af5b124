"""Calls to one server, over connections that follow each other before the server thinks one too old.

A server takes new calls on a connection for `CONNECTION_AGE_S` only. The next connection is opened well before, and
calls begin on it when it stands: while strangers flood the server's port that may take long, and delays nothing.
"""

import asyncio
import random
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager, suppress
from typing import Generic, TypeVar

import grpc

from atoll.protocol import channel as limits

Stub = TypeVar("Stub")

FRESH = 0.6, 0.75
"""When to open the next connection, in parts of the age: gRPC's servers end one a tenth earlier or later."""

ATTEMPT_S = 60.0
"""A connection that does not stand by then is opened anew, with what is the newest certificate then."""


class _Channel(Generic[Stub]):
    """One connection, and how many use it."""

    def __init__(self, channel: grpc.aio.Channel, stub: Stub) -> None:
        self.channel, self.stub, self.num_users = channel, stub, 0


class Connection(Generic[Stub]):
    """See the module docstring. `keep_fresh` must run beside the calls; `close` it always.

    Args:
        dial: opens a channel, with the newest certificate.
        stub_of: makes the stub of one.
    """

    def __init__(self, dial: Callable[[], grpc.aio.Channel], stub_of: Callable[[grpc.aio.Channel], Stub]) -> None:
        self._dial, self._stub_of = dial, stub_of
        self._newest = self._opened()
        self._older: list[_Channel[Stub]] = []
        self._is_due = asyncio.Event()

    @asynccontextmanager
    async def calls(self) -> AsyncIterator[Stub]:
        """The stub for calls that begin now; their connection stays open until they are over."""
        channel = self._newest
        channel.num_users += 1
        try:
            yield channel.stub
        finally:
            channel.num_users -= 1
            await self._close_unused()

    def renew(self) -> None:
        """Change over now: the certificate has been renewed."""
        self._is_due.set()

    async def keep_fresh(self) -> None:
        """Change over in time, again and again."""
        while True:
            with suppress(TimeoutError):
                async with asyncio.timeout(limits.CONNECTION_AGE_S * random.uniform(*FRESH)):
                    await self._is_due.wait()
            self._is_due.clear()
            try:
                async with asyncio.timeout(ATTEMPT_S):
                    await self._change_over()
            except TimeoutError:
                self.renew()

    async def close(self) -> None:
        """End all connections, with all calls."""
        for each in (*self._older, self._newest):
            await each.channel.close()
        self._older.clear()

    def _opened(self) -> _Channel[Stub]:
        channel = self._dial()
        return _Channel(channel, self._stub_of(channel))

    async def _change_over(self) -> None:
        """Calls begin on the next connection as soon as it stands; until then, on the one before."""
        following = self._opened()
        try:
            await following.channel.channel_ready()
        except asyncio.CancelledError:
            await following.channel.close()
            raise
        self._older.append(self._newest)
        self._newest = following
        await self._close_unused()

    async def _close_unused(self) -> None:
        unused = [each for each in self._older if not each.num_users]
        self._older = [each for each in self._older if each.num_users]
        for each in unused:
            await each.channel.close()
