"""A slow line between processes of one machine: a relay of bytes with a rate, a delay and small buffers, to be cut."""

import asyncio
import socket
import threading
import time
from types import TracebackType

SEGMENT_BYTES, BUFFER_BYTES = 1400, 32768
ESTABLISHED = 1
"""State of a TCP connection in `TCP_INFO`."""


class SlowLine:
    """The line to an address, with the same rate in each direction, shared by all connections.

    Args:
        target: host:port at the far end.
        rate: bytes a second.
        delay: seconds in each direction.
    """

    def __init__(self, target: str, rate: float, delay: float = 0.1) -> None:
        self._target, self._rate, self._delay = target, rate, delay
        self.is_cut = False
        """Nothing passes while it is cut, and no end is told."""
        self._free_at = {"up": 0.0, "down": 0.0}
        self._listening = _socket()
        self._listening.bind(("127.0.0.1", 0))
        self.address = f"127.0.0.1:{self._listening.getsockname()[1]}"
        self._thread = threading.Thread(target=lambda: asyncio.run(self._serve()), daemon=True)
        self._begun = threading.Event()
        self._writers: list[asyncio.StreamWriter] = []

    def __enter__(self) -> "SlowLine":
        self._thread.start()
        self._begun.wait()
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, at: TracebackType | None) -> None:
        self._loop.call_soon_threadsafe(self._over.set)
        self._thread.join()

    async def _serve(self) -> None:
        self._loop, self._over = asyncio.get_running_loop(), asyncio.Event()
        server = await asyncio.start_server(self._connected, sock=self._listening, limit=BUFFER_BYTES)
        self._begun.set()
        await self._over.wait()
        server.close()
        self.is_cut = False
        for writer in self._writers:
            writer.transport.abort()
        await asyncio.gather(*(asyncio.all_tasks() - {asyncio.current_task()}), return_exceptions=True)

    async def _connected(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self._writers.append(writer)
        near = writer.transport.get_extra_info("socket")
        writer.transport.pause_reading()
        while self.is_cut:
            await asyncio.sleep(0.05)
        if near.getsockopt(socket.IPPROTO_TCP, socket.TCP_INFO, 1)[0] != ESTABLISHED:
            writer.close()  # given up while the line was cut: no byte of it has gone out
            return
        writer.transport.resume_reading()
        far, (host, _, port) = _socket(), self._target.rpartition(":")
        try:
            await self._loop.sock_connect(far, (host, int(port)))
        except OSError:
            far.close()
            writer.close()
            return
        far_reader, far_writer = await asyncio.open_connection(sock=far, limit=BUFFER_BYTES)
        self._writers.append(far_writer)
        ways = self._pump("up", reader, far_writer), self._pump("down", far_reader, writer)
        await asyncio.gather(*ways, return_exceptions=True)

    async def _pump(self, way: str, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        under_way: asyncio.Queue[tuple[float, bytes]] = asyncio.Queue(maxsize=40)

        async def arrive() -> None:
            try:
                while (item := await under_way.get())[1]:
                    await asyncio.sleep(max(0.0, item[0] - time.monotonic()))
                    writer.write(item[1])
                    await writer.drain()
            except ConnectionError:
                while (await under_way.get())[1]:
                    pass  # what still comes has nowhere to go
            writer.close()

        arriving = asyncio.create_task(arrive())
        try:
            while data := await reader.read(SEGMENT_BYTES):
                while self.is_cut:
                    await asyncio.sleep(0.05)
                self._free_at[way] = max(self._free_at[way], time.monotonic()) + len(data) / self._rate
                await asyncio.sleep(max(0.0, self._free_at[way] - time.monotonic()))
                await under_way.put((time.monotonic() + self._delay, data))
        except ConnectionError:
            pass
        if not arriving.done():
            await under_way.put((0.0, b""))
        await asyncio.gather(arriving, return_exceptions=True)


def _socket() -> socket.socket:
    """Return a socket whose segments and buffers are those of a slow line, not of loopback."""
    made = socket.socket()
    made.setsockopt(socket.IPPROTO_TCP, socket.TCP_MAXSEG, SEGMENT_BYTES)
    made.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, BUFFER_BYTES)
    made.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, BUFFER_BYTES)
    made.setblocking(False)
    return made
