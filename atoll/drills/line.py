"""A line with troubles: a port that forwards each connection to an address, late and slowly, until it is cut."""

import asyncio
import itertools
import socket
import struct
import time
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass, field

from atoll.drills.troubles import Troubles

SEGMENT_BYTES, BUFFER_BYTES, BLOCK_BYTES = 1400, 32768, 64 * 1024
ESTABLISHED = 1
"""State of a TCP connection in `TCP_INFO`, in Linux's tcp_states.h."""

UNDER_WAY = 40
"""Most blocks of one direction of a connection between the two ends of the line."""

LOOK_S = 0.05
"""Time between two looks at whether a line that holds its bytes passes them again, or an end has left [s]."""


@dataclass(slots=True, eq=False)
class _Connection:
    """One connection through the line: near is its caller, far the address behind the line."""

    number: int
    near: asyncio.StreamWriter
    far: asyncio.StreamWriter
    is_deaf: bool = False
    """Whether nothing passes any more, and no end is told."""
    num_bytes: dict[str, int] = field(default_factory=lambda: {"up": 0, "down": 0})

    def reset(self) -> None:
        """End both sides at once; what they have not got is lost."""
        for side in (self.near, self.far):
            _reset(side)


class Line:
    """The line to an address.

    Args:
        target: host and port at its far end.
        troubles: its troubles.
        on_event: called with each thing that the line has done, by name, and its details.
    """

    def __init__(
        self,
        target: tuple[str, int],
        troubles: Troubles,
        on_event: Callable[..., None] = lambda did, **details: None,
    ) -> None:
        self._target, self._troubles, self._on_event = target, troubles, on_event
        self.is_held = False
        """Nothing passes while it is held, and no end is told; set from the loop's thread or any other."""
        self._connections: dict[int, _Connection] = {}
        self._forwarding = set[asyncio.Task[None]]()
        self._numbers = itertools.count(1)
        self._free_at = {"up": 0.0, "down": 0.0}
        # A slow line has small segments and buffers; loopback's would hold megabytes that have "gone out" already.
        self._is_slow = 0 < troubles.rate < 100e6
        self._block_bytes = SEGMENT_BYTES if self._is_slow else BLOCK_BYTES

    def listening(self, host: str, port: int) -> socket.socket:
        """Return a listening socket for `serve`.

        Raises:
            OSError: the address cannot be bound.
        """
        made = self._socket(socket.AF_INET6 if ":" in host else socket.AF_INET)
        try:
            made.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            made.bind((host, port))
            made.listen()
        except BaseException:
            made.close()
            raise
        return made

    async def serve(self, listening: socket.socket) -> None:
        """Forward connections and cut them, until the task is cancelled; then all of them end."""
        server = await asyncio.start_server(self._connected, sock=listening, limit=BUFFER_BYTES)
        try:
            for cut in self._troubles.cuts():
                await asyncio.sleep(cut.wait_s)
                self.cut(is_half_open=cut.is_half_open)
            await asyncio.Event().wait()
        finally:
            server.close()
            self.is_held = False
            for connection in [*self._connections.values()]:
                connection.reset()
            for task in self._forwarding:
                task.cancel()
            await asyncio.gather(*self._forwarding, return_exceptions=True)

    def cut(self, *, is_half_open: bool) -> None:
        """End all open connections by a reset; or let nothing pass through them any more, and tell neither end."""
        hit = [each for each in self._connections.values() if not each.is_deaf]
        self._on_event("cut", connections=[each.number for each in hit], half_open=is_half_open)
        for connection in hit:
            connection.is_deaf = True
            if not is_half_open:
                connection.reset()

    def _connected(self, reader: asyncio.StreamReader, near: asyncio.StreamWriter) -> None:
        task = asyncio.create_task(self._forward(next(self._numbers), reader, near))
        self._forwarding.add(task)
        task.add_done_callback(self._forwarding.discard)

    async def _forward(self, number: int, reader: asyncio.StreamReader, near: asyncio.StreamWriter) -> None:
        near.transport.pause_reading()  # type: ignore[attr-defined]
        while self.is_held:  # noqa: ASYNC110  # set from any thread
            await asyncio.sleep(LOOK_S)
        if not _is_open(near):
            near.close()  # given up while the line was held: no byte of it has gone out
            return
        near.transport.resume_reading()  # type: ignore[attr-defined]
        try:
            far_reader, far = await self._far()
        except OSError as error:
            self._on_event("not connected", connection=number, why=error.strerror or str(error))
            _reset(near)
            return
        connection = self._connections[number] = _Connection(number, near, far)
        self._on_event("connected", connection=number)
        ways = self._pump("up", connection, reader, far), self._pump("down", connection, far_reader, near)
        try:
            await asyncio.gather(*ways)
            for side in (near, far):
                side.close()
        finally:
            del self._connections[number]
            self._on_event("ended", connection=number, **connection.num_bytes)

    async def _far(self) -> tuple[asyncio.StreamReader, asyncio.StreamWriter]:
        host, port = self._target
        loop = asyncio.get_running_loop()
        family, *_, address = (await loop.getaddrinfo(host, port, type=socket.SOCK_STREAM))[0]
        far = self._socket(family)
        try:
            await loop.sock_connect(far, address)
            return await asyncio.open_connection(sock=far, limit=BUFFER_BYTES)
        except BaseException:
            far.close()
            raise

    async def _pump(
        self, way: str, connection: _Connection, reader: asyncio.StreamReader, writer: asyncio.StreamWriter
    ) -> None:
        """Forward one direction of a connection: its bytes leave at the rate of the line, and arrive after a delay."""
        under_way: asyncio.Queue[tuple[float, bytes]] = asyncio.Queue(UNDER_WAY)
        arriving = asyncio.create_task(self._arrive(connection, under_way, writer))
        delays = self._troubles.delays(connection.number, way)
        arrives_at = 0.0
        try:
            while data := await reader.read(self._block_bytes):
                await self._passes(connection)
                connection.num_bytes[way] += len(data)
                if self._troubles.rate:
                    self._free_at[way] = max(self._free_at[way], time.monotonic()) + len(data) / self._troubles.rate
                    await asyncio.sleep(max(0.0, self._free_at[way] - time.monotonic()))
                arrives_at = max(arrives_at, time.monotonic() + next(delays))
                await under_way.put((arrives_at, data))
            await self._passes(connection)  # a half-open line does not tell an end either
        except OSError:
            connection.reset()
        if not arriving.done():
            await under_way.put((0.0, b""))
        await asyncio.gather(arriving, return_exceptions=True)

    async def _arrive(
        self, connection: _Connection, under_way: "asyncio.Queue[tuple[float, bytes]]", writer: asyncio.StreamWriter
    ) -> None:
        try:
            while (item := await under_way.get())[1]:
                if (wait_s := item[0] - time.monotonic()) > 0:
                    await asyncio.sleep(wait_s)
                await self._passes(connection)
                writer.write(item[1])
                await writer.drain()
            writer.write_eof()
        except OSError:
            connection.reset()
            while item[1]:
                item = await under_way.get()  # what still comes has nowhere to go

    async def _passes(self, connection: _Connection) -> None:
        """Return when bytes of a connection may pass.

        Raises:
            ConnectionError: an end has left a connection through which nothing passes any more.
        """
        while self.is_held or connection.is_deaf:
            await asyncio.sleep(LOOK_S)
            if connection.is_deaf and not (_is_open(connection.near) and _is_open(connection.far)):
                connection.reset()
                raise ConnectionAbortedError

    def _socket(self, family: int) -> socket.socket:
        made = socket.socket(family)
        if self._is_slow:
            made.setsockopt(socket.IPPROTO_TCP, socket.TCP_MAXSEG, SEGMENT_BYTES)
            made.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, BUFFER_BYTES)
            made.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, BUFFER_BYTES)
        made.setblocking(False)
        return made


def _reset(writer: asyncio.StreamWriter) -> None:
    """End a connection by a reset, without the bytes that its other end has not got."""
    with suppress(OSError):
        found = writer.transport.get_extra_info("socket")
        found.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
    writer.transport.abort()


def _is_open(writer: asyncio.StreamWriter) -> bool:
    """Return whether the other end of a connection has not left, as the kernel knows it."""
    found = writer.transport.get_extra_info("socket")
    with suppress(OSError):
        return bool(found.getsockopt(socket.IPPROTO_TCP, socket.TCP_INFO, 1)[0] == ESTABLISHED)
    return False
