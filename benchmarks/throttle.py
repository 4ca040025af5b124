"""A port as slow as a network card: `python -m benchmarks.throttle BYTES_PER_S ADDRESS...`.

For each address it listens on a port of its own, prints all of them on one line, and forwards; what goes to the address
is let through at so many bytes per second for all connections of that port together, what comes back at once. The bytes
never enter this process: `splice` moves them from socket to pipe to socket.
"""

import fcntl
import os
import socket
import sys
import threading
import time
from contextlib import closing, suppress

BLOCK_BYTES = 256 * 1024
F_SETPIPE_SZ = 1031
"""Of Linux' fcntl.h."""

BURST_S = 0.02
"""So much of the past may be made up for: a thread that sleeps wakes late."""


class Rate:
    """How fast all who take from it may go together."""

    def __init__(self, bytes_per_s: float) -> None:
        self._bytes_per_s, self._free_at, self._lock = bytes_per_s, 0.0, threading.Lock()

    def take(self, num_bytes: int) -> None:
        """Wait until so many bytes may go."""
        if not self._bytes_per_s:
            return
        with self._lock:
            now = time.monotonic()
            begin = max(self._free_at, now - BURST_S)
            self._free_at = begin + num_bytes / self._bytes_per_s
        if begin > now:
            time.sleep(begin - now)


def forward(source: socket.socket, sink: socket.socket, rate: Rate) -> None:
    """Move bytes until the source ends."""
    out, into = os.pipe()
    fcntl.fcntl(into, F_SETPIPE_SZ, BLOCK_BYTES)
    try:
        while num_bytes := os.splice(source.fileno(), into, BLOCK_BYTES):
            rate.take(num_bytes)
            while num_bytes:
                num_bytes -= os.splice(out, sink.fileno(), num_bytes)
    except OSError:
        pass  # one side is gone
    finally:
        for side in (source, sink):
            with suppress(OSError):
                side.shutdown(socket.SHUT_RDWR)
        os.close(out)
        os.close(into)


def serve(listener: socket.socket, address: str, rate: Rate) -> None:
    """Accept connections, and forward each both ways."""
    host, _, port = address.rpartition(":")
    while True:
        near, _ = listener.accept()
        far = socket.create_connection((host, int(port)))
        for side in (near, far):
            side.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        for pair in ((near, far, rate), (far, near, Rate(0.0))):
            threading.Thread(target=forward, args=pair, daemon=True).start()


def main() -> None:
    """Serve until a signal comes."""
    bytes_per_s, *addresses = sys.argv[1:]
    listeners = [socket.create_server(("127.0.0.1", 0)) for _ in addresses]
    print(" ".join(f"127.0.0.1:{listener.getsockname()[1]}" for listener in listeners), flush=True)
    for listener, address in zip(listeners, addresses, strict=True):
        threading.Thread(target=serve, args=(listener, address, Rate(float(bytes_per_s))), daemon=True).start()
    with closing(listeners[0]):
        threading.Event().wait()


if __name__ == "__main__":
    main()
