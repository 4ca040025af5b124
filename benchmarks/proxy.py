"""A TCP proxy on loopback that counts every byte and can act at an exact position of the traffic."""

import socket
import threading
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass, field
from enum import Enum

BUFFER_BYTES = 64 * 1024
CONNECT_TIMEOUT_S = 2.0


class Way(Enum):
    """The direction of bytes."""

    UP = "up"  # from the agent to the coordinator
    DOWN = "down"


@dataclass(slots=True, eq=False)
class Crossing:
    """One connection through the proxy, with the bytes that each end has sent."""

    near: socket.socket  # the agent's side
    far: socket.socket
    num_bytes: dict[Way, int] = field(default_factory=lambda: dict.fromkeys(Way, 0))
    is_cut: bool = False

    def cut(self) -> None:
        """Close both sides at once; bytes that were sent but not yet read are counted as well."""
        if self.is_cut:
            return
        self.is_cut = True
        for way, source in ((Way.UP, self.near), (Way.DOWN, self.far)):
            with suppress(OSError):
                while data := source.recv(BUFFER_BYTES, socket.MSG_DONTWAIT):
                    self.num_bytes[way] += len(data)
        for side in (self.near, self.far):
            with suppress(OSError):
                side.shutdown(socket.SHUT_RDWR)
            side.close()


class Proxy:
    """A port that forwards to `address`; it closes at the end of its `with` block.

    Args:
        address: host:port of the coordinator; while it is not listening, connections are closed at once.
        on_bytes: called with (crossing, way) when bytes have come, before they are forwarded. It may cut the crossing.
    """

    def __init__(
        self,
        address: str,
        *,
        on_bytes: Callable[[Crossing, Way], None],
    ) -> None:
        host, _, port = address.rpartition(":")
        self._target = (host, int(port))
        self._on_bytes = on_bytes
        self._listener = socket.create_server(("127.0.0.1", 0))
        self.crossings: list[Crossing] = []
        self.address = f"127.0.0.1:{self._listener.getsockname()[1]}"

    def __enter__(self) -> "Proxy":
        threading.Thread(target=self._accept, daemon=True).start()
        return self

    def __exit__(self, *_: object) -> None:
        with suppress(OSError):
            self._listener.shutdown(socket.SHUT_RDWR)
        self._listener.close()
        for crossing in self.crossings:
            crossing.cut()

    def _accept(self) -> None:
        while True:
            try:
                near, _ = self._listener.accept()
            except OSError:
                return  # closed
            try:
                far = socket.create_connection(self._target, timeout=CONNECT_TIMEOUT_S)
            except OSError:
                near.close()
                continue
            far.settimeout(None)
            for side in (near, far):
                side.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
            crossing = Crossing(near, far)
            self.crossings.append(crossing)
            for way in Way:
                threading.Thread(target=self._pump, args=(crossing, way), daemon=True).start()

    def _pump(self, crossing: Crossing, way: Way) -> None:
        source, sink = (crossing.near, crossing.far) if way is Way.UP else (crossing.far, crossing.near)
        with suppress(OSError):
            while data := source.recv(BUFFER_BYTES):
                crossing.num_bytes[way] += len(data)
                self._on_bytes(crossing, way)
                if crossing.is_cut:
                    return
                sink.sendall(data)
        crossing.cut()
