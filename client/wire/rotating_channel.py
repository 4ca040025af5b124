"""The channel to one server, rotated over connections so that none reaches the age at which the server refuses calls.

A server accepts new calls on a connection for `CONNECTION_AGE_S` only. The next connection is opened well before that,
and new calls use it once it is up; if the server's port is flooded this may take long, but delays nothing.

Large downloads have one more connection, with blocking calls: read on a thread, without asyncio's wake-ups between
chunks, they are 6 % faster. It is opened on demand, and no call depends on it.

A server admits three connections of a client (`server/transport/limits.py`): the one with the control stream, which
never moves; the newest one; and the next one or the one for large downloads, which is closed before a rotation if it is
idle. A transfer of more than `SHARED_BYTES` never begins on the connection of the control stream: on a slow line its
queued bytes would delay heartbeats and orders. So the first such transfer causes a rotation.
"""

import asyncio
import random
from collections.abc import AsyncIterator, Callable
from contextlib import AbstractAsyncContextManager, asynccontextmanager, suppress
from typing import Generic, TypeVar

import grpc

from atoll.ground.backoff import delay
from atoll.protocol.identity.dialer import Dialer
from atoll.protocol.identity.names import Identity
from atoll.protocol.wire import channel as limits
from atoll.protocol.wire.stream import StreamBroken

Stub = TypeVar("Stub")

FRESH = 0.6, 0.75
"""Fractions of the age between which the next connection is opened: gRPC servers vary their limit by a tenth."""

ATTEMPT_S = 60.0
"""Time limit of one attempt to connect [s]."""

TRANSFER_S = 0.2
"""Interval between two checks whether a long transfer has ended [s]."""

SHARED_BYTES = 64 * 1024
"""Largest transfer on the connection of the control stream: it delays a heartbeat by 4 s at 16 KiB/s."""

APART_S = 5.0
"""Longest wait of a transfer for a connection apart from the control stream [s]: the port may be flooded."""

PAUSE_S = 5.0
"""Pause before the second attempt to connect [s]; it doubles with each further one."""


class _Channel(Generic[Stub]):
    """One connection and the number of calls on it."""

    def __init__(self, channel: grpc.aio.Channel | grpc.Channel, stub: Stub) -> None:
        self.channel, self.stub, self.num_users = channel, stub, 0
        self.has_control_stream = False

    async def close(self) -> None:
        """Close the connection and end all calls on it."""
        closing = self.channel.close()
        if closing is not None:  # a blocking connection is closed at once
            await closing


class RotatingChannel(Generic[Stub]):
    """Channel to one server, over successive connections. `keep_fresh` must run beside the calls; `close` it always.

    Args:
        dialer: opens the connections, with the newest certificate.
        address: the address of the server.
        server: the identity that the server must prove.
        stub_of: makes the stub of a channel, asyncio or blocking.
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
        self._rotating = asyncio.Lock()

    def calls(self) -> AbstractAsyncContextManager[Stub]:
        """Return the stub for new calls; their connection stays open until they have ended."""
        return self._used(self._newest)

    def control_calls(self) -> AbstractAsyncContextManager[Stub]:
        """Return the stub for a control stream, beside which no large transfer begins."""
        self._newest.has_control_stream = True
        return self.calls()

    async def bulk_calls(self, num_bytes: int) -> AbstractAsyncContextManager[Stub]:
        """Return the stub for a transfer of `num_bytes`, apart from the control stream if they are many."""
        if num_bytes > SHARED_BYTES and self._newest.has_control_stream and not self._is_closed:
            async with self._rotating:
                if self._newest.has_control_stream and not self._is_closed:
                    await self._rotate(APART_S)
        return self.calls()

    def blocking_calls(self) -> AbstractAsyncContextManager[Stub]:
        """Return the stub for blocking calls from a thread; their connection may never come up.

        Raises:
            StreamBroken: the channel was closed.
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
        """Rotate now: the certificate was renewed."""
        self._is_renewed.set()

    async def keep_fresh(self) -> None:
        """Rotate before each connection is too old; repeat a failed rotation with back-off."""
        rng = random.Random()
        while True:
            is_due = await self._renewed_within(limits.CONNECTION_AGE_S * rng.uniform(*FRESH))
            while not is_due and self._older and self._newest.num_users:
                is_due = await self._renewed_within(TRANSFER_S)  # the server admits no further connection
            num_failures = 0
            while not await self._rotated():
                await self._renewed_within(delay(num_failures, PAUSE_S, limits.CONNECTION_AGE_S, rng))
                num_failures += 1

    async def close(self) -> None:
        """Close all connections and end all calls on them."""
        self._is_closed = True
        self._set_aside(self._newest)
        for each in self._older:
            await each.close()
        self._older.clear()

    def _opened(self, channel: grpc.aio.Channel | grpc.Channel) -> _Channel[Stub]:
        return _Channel(channel, self._stub_of(channel))

    def _set_aside(self, newest: _Channel[Stub]) -> None:
        """Start no further call on the current connections; the next large download opens a new one."""
        self._older += [newest, *([self._blocking] if self._blocking is not None else [])]
        self._blocking = None

    async def _rotated(self) -> bool:
        async with self._rotating:
            return await self._rotate(ATTEMPT_S)

    async def _rotate(self, timeout: float) -> bool:
        """Open the next connection, start new calls on it once it is up, and return whether it is up within `timeout`.

        The attempt ends early when the certificate is renewed.
        """
        self._is_renewed.clear()
        await self._close_idle()
        channel = self._dialer.channel(self._address, self._server)
        following = self._opened(channel)
        ready, renewed = map(asyncio.ensure_future, (channel.channel_ready(), self._is_renewed.wait()))
        try:
            await asyncio.wait({ready, renewed}, timeout=timeout, return_when=asyncio.FIRST_COMPLETED)
        finally:
            is_up = ready.done() and not ready.cancelled()
            ready.cancel()
            renewed.cancel()
            if not is_up:
                await following.close()
        if is_up:
            ready.result()
            self._set_aside(self._newest)
            self._newest = following
            await self._close_unused()
        return is_up

    async def _renewed_within(self, seconds: float) -> bool:
        """Wait for `seconds`, or until the certificate is renewed; return whether it was."""
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
