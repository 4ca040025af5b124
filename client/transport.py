"""One connection to the coordinator: a channel, and the control stream on it.

Everything of one attempt is fresh: the channel, the stream, the session's name. What breaks is a `StreamBroken`,
however it breaks; the caller decides what it means and when to dial again.
"""

import asyncio
import logging
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from typing import Generic, TypeVar

import grpc

from atoll.protocol import atoll_pb2 as pb
from atoll.protocol.bulk import coordinator_stub
from atoll.protocol.channel import HANDSHAKE_S

logger = logging.getLogger(__name__)

SEND_TIMEOUT_S = 30.0
"""A control message that the connection does not take for so long: the connection is dead."""

CLOSE_TIMEOUT_S = 1.0
OUTBOX_MAX = 1000

OLDER_CHANNELS_MAX = 16
"""Channels that stay open after the certificate was renewed, for what is under way over them."""

Request = TypeVar("Request")
Reply = TypeVar("Reply")


class StreamBroken(ConnectionError):
    """A call did not end as it should: cut, refused, or timed out."""

    def __init__(self, code: grpc.StatusCode, detail: str) -> None:
        self.code, self.detail = code, detail
        super().__init__(f"{code.name}: {detail}" if detail else code.name)

    @property
    def is_replaced(self) -> bool:
        """Whether a newer stream of the same client has taken this one's place."""
        return self.code is grpc.StatusCode.ABORTED and "replaced" in self.detail

    @property
    def is_revoked(self) -> bool:
        """Whether this agent is no member any more."""
        return self.code is grpc.StatusCode.UNAUTHENTICATED and "revoked" in self.detail


@contextmanager
def broken_streams() -> Iterator[None]:
    """Turn everything that grpc raises about a call that ended into StreamBroken."""
    try:
        yield
    except grpc.aio.AioRpcError as error:
        raise StreamBroken(error.code(), error.details() or "") from None
    except asyncio.CancelledError:
        task = asyncio.current_task()
        if task is None or task.cancelling():
            raise
        raise StreamBroken(grpc.StatusCode.CANCELLED, "the channel was closed") from None
    except grpc.aio.UsageError as error:  # the channel is closed
        raise StreamBroken(grpc.StatusCode.CANCELLED, str(error)) from None


class Stream(Generic[Request, Reply]):
    """A bidirectional call; its ends are values or StreamBroken, never grpc's own.

    Replies are iterated over rather than `read`: a write that crosses the end of the call makes grpc.aio consider it
    failed, and from then on `read` no longer gives what has come before that, such as a verdict.
    """

    def __init__(self, method: "grpc.aio.StreamStreamMultiCallable[Request, Reply]") -> None:
        with broken_streams():
            self._call = method()
        self._replies = aiter(self._call)
        self._is_begun, self._ended = False, asyncio.Event()
        self._call.add_done_callback(lambda _: self._ended.set())

    async def write(self, message: Request) -> None:
        """Hand a message to the connection. On a call that has ended nothing happens: `read` says how it ended."""
        with suppress(asyncio.InvalidStateError, StreamBroken), broken_streams():
            if self._is_begun:
                await self._call.write(message)
            else:
                await self._begin(message)

    async def _begin(self, message: Request) -> None:
        """The first message. If the call ends before its metadata were sent, grpc.aio waits for these for ever."""
        writing, ended = asyncio.ensure_future(self._call.write(message)), asyncio.ensure_future(self._ended.wait())
        try:
            await asyncio.wait({writing, ended}, return_when=asyncio.FIRST_COMPLETED)
            if writing.done():
                self._is_begun = True
                await writing
        finally:
            writing.cancel()
            ended.cancel()

    async def read(self) -> Reply | None:
        """The next message; None when the other side has ended the call well."""
        with broken_streams():
            return await anext(self._replies, None)

    async def half_close(self) -> None:
        """Say that nothing more will be written."""
        with suppress(asyncio.InvalidStateError, StreamBroken), broken_streams():
            await self._call.done_writing()

    def cancel(self) -> None:
        """Break the call off."""
        self._call.cancel()


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
