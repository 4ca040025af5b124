"""One session with the coordinator: the control stream, and the connections for the calls beside it.

Each session has a new connection, stream and session name. Every failure is a `StreamBroken`; the caller decides what
it means and when to dial again.
"""

import asyncio
import logging
import time
from contextlib import AbstractAsyncContextManager, AsyncExitStack, suppress

import grpc

from atoll.client.wire.rotating_channel import RotatingChannel
from atoll.protocol import atoll_pb2 as pb
from atoll.protocol import services as rpc
from atoll.protocol.identity.dialer import Dialer
from atoll.protocol.identity.names import COORDINATOR
from atoll.protocol.wire.bulk_messages import coordinator_stub
from atoll.protocol.wire.channel import HANDSHAKE_S
from atoll.protocol.wire.stream import Stream, StreamBroken

logger = logging.getLogger(__name__)

SEND_TIMEOUT_S = 30.0
"""Time after which a connection that accepts no control message counts as dead [s]."""

CLOSE_TIMEOUT_S = 1.0
OUTBOX_MAX = 1000


class Link:
    """Connection of one session: a control stream, and calls beside it.

    `open` it once, `receive` until it ends, and `close` it always.

    Args:
        dialer: opens channels to the coordinator, with the newest certificate; the link closes them.
        address: the address of the coordinator.
    """

    def __init__(self, dialer: Dialer, address: str) -> None:
        self.connection = RotatingChannel(dialer, address, COORDINATOR, coordinator_stub)
        self._stream_channel = AsyncExitStack()
        self._outbox: asyncio.Queue[pb.ClientMessage | None] = asyncio.Queue(OUTBOX_MAX)
        self._stream: Stream[pb.ClientMessage, pb.ServerMessage] | None = None
        self._writer: asyncio.Task[None] | None = None
        self._ended = asyncio.Event()
        self._heartbeat_s = 0.0

    async def open(self, hello: pb.Hello) -> pb.ServerMessage:
        """Send Hello and return the coordinator's Welcome, unverified.

        Raises:
            StreamBroken: there is no connection or no answer in time, or the coordinator refuses.
        """
        stub = await self._stream_channel.enter_async_context(self.connection.control_calls())
        stream = self._stream = Stream(stub.Session)
        try:
            async with asyncio.timeout(HANDSHAKE_S):
                await stream.write(pb.ClientMessage(hello=hello))
                message = await stream.read()
        except TimeoutError:
            detail = f"no Welcome within {HANDSHAKE_S} s"
            raise StreamBroken(grpc.StatusCode.DEADLINE_EXCEEDED, detail) from None
        if message is None or message.WhichOneof("message") != "welcome":
            raise StreamBroken(grpc.StatusCode.UNKNOWN, "the coordinator's first message is not a Welcome")
        self._heartbeat_s = max(0.05, min(3600.0, message.welcome.heartbeat_s))  # this order turns NaN into 3600
        self._writer = asyncio.create_task(self._write(stream))
        return message

    def calls(self) -> AbstractAsyncContextManager[rpc.Stub]:
        """Return the stub for new calls; see `RotatingChannel.calls`."""
        return self.connection.calls()

    async def receive(self) -> pb.ServerMessage | None:
        """Return the next message; None when the coordinator has ended the stream.

        Raises:
            StreamBroken: the stream was cut.
        """
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
        """Queue a message, without waiting; break off a connection whose queue is full."""
        if self._outbox.full():
            self._break_off(f"{OUTBOX_MAX} messages wait for it")
        else:
            self._outbox.put_nowait(message)

    async def close(self, *, goodbye: bool = False) -> None:
        """Close the connections and end all calls on them.

        Args:
            goodbye: first send the queued messages and Goodbye, and let the coordinator end the stream; a task must be
                receiving meanwhile.
        """
        if goodbye and self._writer is not None and not self._writer.done():
            self.send(pb.ClientMessage(goodbye=pb.Goodbye()))
            with suppress(asyncio.QueueFull, TimeoutError):
                self._outbox.put_nowait(None)
                async with asyncio.timeout(CLOSE_TIMEOUT_S):
                    await self._ended.wait()
        if self._writer is not None:
            self._writer.cancel()
        await self.connection.close()
        await self._stream_channel.aclose()

    async def decline(self, why: str) -> None:
        """Send a goodbye with its reason, and wait for a bounded time until the coordinator ends the stream.

        Args:
            why: a FailureReason, a colon and details.
        """
        self.send(pb.ClientMessage(goodbye=pb.Goodbye(why=why)))
        with suppress(asyncio.QueueFull, TimeoutError, StreamBroken):
            self._outbox.put_nowait(None)
            async with asyncio.timeout(CLOSE_TIMEOUT_S):
                while await self.receive() is not None:
                    pass

    async def _write(self, stream: Stream[pb.ClientMessage, pb.ServerMessage]) -> None:
        """Send the queued messages, and a heartbeat after each heartbeat interval without one."""
        while True:
            try:
                async with asyncio.timeout(self._heartbeat_s):
                    message = await self._outbox.get()
            except TimeoutError:
                message = pb.ClientMessage(heartbeat=pb.Heartbeat(clock=time.time()))
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
