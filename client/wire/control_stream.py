"""One session with the coordinator: the control stream, and the connections for the calls beside it.

Everything of one attempt is fresh: the connection, the stream, the session's name. What breaks is a `StreamBroken`,
however it breaks; the caller decides what it means and when to dial again.
"""

import asyncio
import logging
from contextlib import AbstractAsyncContextManager, AsyncExitStack, suppress

import grpc

from atoll.client.wire.rotating_channel import RotatingChannel
from atoll.protocol import atoll_pb2 as pb
from atoll.protocol import atoll_pb2_grpc as rpc
from atoll.protocol.identity.dialer import Dialer
from atoll.protocol.identity.names import COORDINATOR
from atoll.protocol.wire.bulk_messages import coordinator_stub
from atoll.protocol.wire.channel import HANDSHAKE_S
from atoll.protocol.wire.stream import Stream, StreamBroken

logger = logging.getLogger(__name__)

SEND_TIMEOUT_S = 30.0
"""A control message that the connection does not take for so long: the connection is dead."""

CLOSE_TIMEOUT_S = 1.0
OUTBOX_MAX = 1000


class Link:
    """A control stream, and calls beside it. `open` it once, `receive` until it ends, `close` it always.

    Args:
        dialer: opens channels to the coordinator, with the newest certificate; the link closes them.
        address: of the coordinator.
    """

    def __init__(self, dialer: Dialer, address: str) -> None:
        self.connection = RotatingChannel(dialer, address, COORDINATOR, coordinator_stub)
        self._of_stream = AsyncExitStack()
        self._outbox: asyncio.Queue[pb.ClientMessage | None] = asyncio.Queue(OUTBOX_MAX)
        self._stream: Stream[pb.ClientMessage, pb.ServerMessage] | None = None
        self._writer: asyncio.Task[None] | None = None
        self._ended = asyncio.Event()
        self._heartbeat_s = 0.0

    async def open(self, hello: pb.Hello) -> pb.ServerMessage:
        """Say Hello and wait for Welcome, which is returned as it came: signed, or not.

        Raises:
            StreamBroken: no connection, no answer in time, or refused.
        """
        stub = await self._of_stream.enter_async_context(self.calls())
        stream = self._stream = Stream(stub.Session)
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

    def calls(self) -> AbstractAsyncContextManager[rpc.CoordinatorStub]:
        """The stub for calls that begin now (`RotatingChannel.calls`)."""
        return self.connection.calls()

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
        """End the connections with all calls.

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
        await self.connection.close()
        await self._of_stream.aclose()

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
