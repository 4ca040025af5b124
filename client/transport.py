"""One connection to the coordinator: a channel, and the control stream on it.

Everything of one attempt is fresh: the channel, the stream, the session's name. What breaks is a `StreamBroken`,
however it breaks; the caller decides what it means and when to dial again.
"""

import asyncio
import logging
from contextlib import suppress

import grpc

from atoll.protocol import atoll_pb2 as pb
from atoll.protocol.bulk import coordinator_stub
from atoll.protocol.channel import HANDSHAKE_S
from atoll.protocol.stream import Stream, StreamBroken

logger = logging.getLogger(__name__)

SEND_TIMEOUT_S = 30.0
"""A control message that the connection does not take for so long: the connection is dead."""

CLOSE_TIMEOUT_S = 1.0
OUTBOX_MAX = 1000

OLDER_CHANNELS_MAX = 16
"""Channels that stay open after the certificate was renewed, for what is under way over them."""


class Link:
    """A connection with its control stream. `open` it once, `receive` until it ends, `close` it always.

    Args:
        channel: to the coordinator; the link closes it.
    """

    def __init__(self, channel: grpc.aio.Channel) -> None:
        self._channels = [channel]
        self.stub = coordinator_stub(channel)
        self._outbox: asyncio.Queue[pb.ClientMessage | None] = asyncio.Queue(OUTBOX_MAX)
        self._stream: Stream[pb.ClientMessage, pb.ServerMessage] | None = None
        self._writer: asyncio.Task[None] | None = None
        self._ended = asyncio.Event()
        self._heartbeat_s = 0.0
        self._closing: asyncio.Task[None] | None = None

    async def open(self, hello: pb.Hello) -> pb.ServerMessage:
        """Say Hello and wait for Welcome, which is returned as it came: signed, or not.

        Raises:
            StreamBroken: no connection, no answer in time, or refused.
        """
        stream = self._stream = Stream(self.stub.Session)
        try:
            async with asyncio.timeout(HANDSHAKE_S):
                await stream.write(pb.ClientMessage(hello=hello))
                message = await stream.read()
        except TimeoutError:
            detail = f"no Welcome within {HANDSHAKE_S} s"
            raise StreamBroken(grpc.StatusCode.DEADLINE_EXCEEDED, detail) from None
        if message is None or message.WhichOneof("message") != "welcome":
            raise StreamBroken(grpc.StatusCode.UNKNOWN, "the coordinator did not begin with Welcome")
        self._heartbeat_s = max(0.05, min(3600.0, message.welcome.heartbeat_s))  # in this order: NaN is 3600
        self._writer = asyncio.create_task(self._write(stream))
        return message

    async def receive(self) -> pb.ServerMessage | None:
        """The next message; None when the coordinator has ended the stream. Raises StreamBroken."""
        assert self._stream is not None, "open comes first"
        try:
            message = await self._stream.read()
        except StreamBroken:
            self._ended.set()
            raise
        if message is None:
            self._ended.set()
        return message

    def send(self, message: pb.ClientMessage) -> None:
        """Send a message after those before it; never waits. A connection that takes none is broken off."""
        if self._outbox.full():
            self._break_off("its outbox is full")
        else:
            self._outbox.put_nowait(message)

    async def close(self, *, goodbye: bool = False) -> None:
        """End the channel with all its calls.

        Args:
            goodbye: first send what is in the outbox, then Goodbye, and let the coordinator end the stream; somebody
                must be receiving meanwhile.
        """
        if goodbye and self._writer is not None and not self._writer.done():
            self.send(pb.ClientMessage(goodbye=pb.Goodbye()))
            with suppress(asyncio.QueueFull, TimeoutError):
                self._outbox.put_nowait(None)
                async with asyncio.timeout(CLOSE_TIMEOUT_S):
                    await self._ended.wait()
        if self._writer is not None:
            self._writer.cancel()
        for channel in self._channels:
            await channel.close()

    def renew(self, channel: grpc.aio.Channel) -> None:
        """Begin calls on this channel from now on; what is under way goes on as it is."""
        self._channels.append(channel)
        self.stub = coordinator_stub(channel)
        if len(self._channels) > 1 + OLDER_CHANNELS_MAX:  # the first has the control stream
            self._closing = asyncio.create_task(self._channels.pop(1).close())

    async def _write(self, stream: Stream[pb.ClientMessage, pb.ServerMessage]) -> None:
        """Send what is in the outbox, and a heartbeat whenever that is empty for too long."""
        heartbeat = pb.ClientMessage(heartbeat=pb.Heartbeat())
        while True:
            try:
                async with asyncio.timeout(self._heartbeat_s):
                    message = await self._outbox.get()
            except TimeoutError:
                message = heartbeat
            if message is None:
                return await stream.half_close()
            try:
                async with asyncio.timeout(SEND_TIMEOUT_S):
                    await stream.write(message)
            except TimeoutError:
                return self._break_off(f"it took no message for {SEND_TIMEOUT_S:g} s")

    def _break_off(self, why: str) -> None:
        logger.warning("the connection is broken off: %s", why)
        if self._stream is not None:
            self._stream.cancel()
