"""Ports with the rate of a slow network card: `python -m benchmarks.throttle BYTES_PER_S ADDRESS...`.

For each address the process listens on a port, prints all ports on one line, and forwards. Bytes to an address are
limited to BYTES_PER_S over all connections of its port; bytes from it are not limited. The bytes never enter this
process: `splice` moves them from socket to pipe to socket.
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
"""The constant of Linux's fcntl.h."""

BURST_S = 0.02
"""Seconds of unused rate that may be caught up, as a sleeping thread wakes late."""


class Rate:
    """A limit on the bytes per second of all threads that share it."""

    def __init__(self, bytes_per_s: float) -> None:
        self._bytes_per_s, self._free_at, self._lock = bytes_per_s, 0.0, threading.Lock()

    def take(self, num_bytes: int) -> None:
        """Wait until these bytes may pass."""
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
    """Accept connections, and forward each in both directions."""
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
