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
"""A connection that does not stand by then is given up."""

TRANSFER_S = 0.2
"""How often one looks whether a long transfer has ended."""

PAUSE_S = 5.0
"""Before it is tried for the second time; twice as long before the third."""


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
        self._is_renewed = asyncio.Event()

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
        self._is_renewed.set()

    async def keep_fresh(self) -> None:
        """Change over in time, again and again; what fails is tried again after longer and longer pauses."""
        while True:
            is_due = await self._renewed_within(limits.CONNECTION_AGE_S * random.uniform(*FRESH))
            while not is_due and self._older and self._newest.num_users:
                is_due = await self._renewed_within(TRANSFER_S)  # the server has places for two connections of each
            pause = PAUSE_S
            while not await self._change_over():
                await self._renewed_within(pause * random.uniform(0.5, 1.0))
                pause = min(2 * pause, limits.CONNECTION_AGE_S)

    async def close(self) -> None:
        """End all connections, with all calls."""
        for each in (*self._older, self._newest):
            await each.channel.close()
        self._older.clear()

    def _opened(self) -> _Channel[Stub]:
        channel = self._dial()
        return _Channel(channel, self._stub_of(channel))

    async def _change_over(self) -> bool:
        """Let calls begin on the next connection as soon as it stands, until then on the one before; whether it does.

        There is no use in waiting any longer when the certificate is renewed meanwhile.
        """
        self._is_renewed.clear()
        following = self._opened()
        ready, renewed = map(asyncio.ensure_future, (following.channel.channel_ready(), self._is_renewed.wait()))
        try:
            await asyncio.wait({ready, renewed}, timeout=ATTEMPT_S, return_when=asyncio.FIRST_COMPLETED)
        finally:
            stands = ready.done() and not ready.cancelled()
            ready.cancel()
            renewed.cancel()
            if not stands:
                await following.channel.close()
        if stands:
            ready.result()
            self._older.append(self._newest)
            self._newest = following
            await self._close_unused()
        return stands

    async def _renewed_within(self, seconds: float) -> bool:
        """Wait for so long, or until the certificate is renewed; whether it is."""
        with suppress(TimeoutError):
            async with asyncio.timeout(seconds):
                await self._is_renewed.wait()
        return self._is_renewed.is_set()

    async def _close_unused(self) -> None:
        unused = [each for each in self._older if not each.num_users]
        self._older = [each for each in self._older if each.num_users]
        for each in unused:
            await each.channel.close()
