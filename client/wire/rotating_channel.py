"""Calls to one server, over connections that follow each other before the server thinks one too old.

A server takes new calls on a connection for `CONNECTION_AGE_S` only. The next connection is opened well before, and
calls begin on it when it stands: while strangers flood the server's port that may take long, and delays nothing.

Large downloads have a connection beside it, whose calls block: read on a thread, without asyncio's wake-ups between one
chunk and the next, they are faster by 6 %. It is opened when one of them wants it, and nobody depends on it.

A server has three places for a client (`server/transport/limits.py`): its control stream, which stays where it began;
the newest connection; and the next one or the one for large downloads, which is closed before a change-over when idle.
"""

import asyncio
import random
from collections.abc import AsyncIterator, Callable
from contextlib import AbstractAsyncContextManager, asynccontextmanager, suppress
from typing import Generic, TypeVar

import grpc

from atoll.protocol.backoff import delay
from atoll.protocol.identity.dialer import Dialer
from atoll.protocol.identity.names import Identity
from atoll.protocol.wire import channel as limits
from atoll.protocol.wire.stream import StreamBroken

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

    def __init__(self, channel: grpc.aio.Channel | grpc.Channel, stub: Stub) -> None:
        self.channel, self.stub, self.num_users = channel, stub, 0

    async def close(self) -> None:
        """End it, with all calls."""
        closing = self.channel.close()
        if closing is not None:  # a blocking one is closed at once
            await closing


class RotatingChannel(Generic[Stub]):
    """See the module docstring. `keep_fresh` must run beside the calls; `close` it always.

    Args:
        dialer: opens the channels, with the newest certificate.
        address: of the server.
        server: who it must prove to be.
        stub_of: makes the stub of a channel, of either kind.
    """

    def __init__(
        self,
        dialer: Dialer,
        address: str,
        server: Identity,
        stub_of: Callable[[grpc.aio.Channel | grpc.Channel], Stub],
    ) -> None:
        self._dialer, self._address, self._server, self._stub_of = dialer, address, server, stub_of
        self._newest = self._opened(dialer.channel(address, server))
        self._blocking: _Channel[Stub] | None = None
        self._older: list[_Channel[Stub]] = []
        self._is_renewed = asyncio.Event()
        self._is_closed = False

    def calls(self) -> AbstractAsyncContextManager[Stub]:
        """The stub for calls that begin now; their connection stays open until they are over."""
        return self._used(self._newest)

    def blocking_calls(self) -> AbstractAsyncContextManager[Stub]:
        """The same for calls that a thread reads. Whether their connection will ever stand, nobody knows.

        Raises:
            StreamBroken: all has been closed.
        """
        if self._is_closed:
            raise StreamBroken(grpc.StatusCode.CANCELLED, "the channel was closed")
        if self._blocking is None:
            self._blocking = self._opened(self._dialer.blocking_channel(self._address, self._server))
        return self._used(self._blocking)

    @asynccontextmanager
    async def _used(self, channel: _Channel[Stub]) -> AsyncIterator[Stub]:
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
        rng = random.Random()
        while True:
            is_due = await self._renewed_within(limits.CONNECTION_AGE_S * rng.uniform(*FRESH))
            while not is_due and self._older and self._newest.num_users:
                is_due = await self._renewed_within(TRANSFER_S)  # there is no place for one more
            num_failures = 0
            while not await self._change_over():
                await self._renewed_within(delay(num_failures, PAUSE_S, limits.CONNECTION_AGE_S, rng))
                num_failures += 1

    async def close(self) -> None:
        """End all connections, with all calls."""
        self._is_closed = True
        self._set_aside(self._newest)
        for each in self._older:
            await each.close()
        self._older.clear()

    def _opened(self, channel: grpc.aio.Channel | grpc.Channel) -> _Channel[Stub]:
        return _Channel(channel, self._stub_of(channel))

    def _set_aside(self, newest: _Channel[Stub]) -> None:
        """Let no call begin on the connections of now; the next large download opens its own anew."""
        self._older += [newest, *([self._blocking] if self._blocking is not None else [])]
        self._blocking = None

    async def _change_over(self) -> bool:
        """Let calls begin on the next connection as soon as it stands, until then on the one before; whether it does.

        There is no use in waiting any longer when the certificate is renewed meanwhile.
        """
        self._is_renewed.clear()
        await self._close_idle()
        channel = self._dialer.channel(self._address, self._server)
        following = self._opened(channel)
        ready, renewed = map(asyncio.ensure_future, (channel.channel_ready(), self._is_renewed.wait()))
        try:
            await asyncio.wait({ready, renewed}, timeout=ATTEMPT_S, return_when=asyncio.FIRST_COMPLETED)
        finally:
            stands = ready.done() and not ready.cancelled()
            ready.cancel()
            renewed.cancel()
            if not stands:
                await following.close()
        if stands:
            ready.result()
            self._set_aside(self._newest)
            self._newest = following
            await self._close_unused()
        return stands

    async def _renewed_within(self, seconds: float) -> bool:
        """Wait for so long, or until the certificate is renewed; whether it is."""
        with suppress(TimeoutError):
            async with asyncio.timeout(seconds):
                await self._is_renewed.wait()
        return self._is_renewed.is_set()

    async def _close_idle(self) -> None:
        if (idle := self._blocking) is not None and not idle.num_users:
            self._blocking = None
            await idle.close()

    async def _close_unused(self) -> None:
        unused = [each for each in self._older if not each.num_users]
        self._older = [each for each in self._older if each.num_users]
        for each in unused:
            await each.close()
