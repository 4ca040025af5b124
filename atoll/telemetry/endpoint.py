"""The HTTP endpoint of the metrics: `GET /metrics`, on loopback, or with mutual TLS for members who may read."""

import logging
import socket
import sys
import threading
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

from prometheus_client import CollectorRegistry
from prometheus_client.exposition import choose_encoder

from atoll.ground.address import bracketed
from atoll.protocol.wire.channel import loopback_only, parse_address
from atoll.server.identity.readers import Readers
from atoll.telemetry.pipeline import ReadingFailed

logger = logging.getLogger(__name__)

PATH = "/metrics"

CALLS_MAX = 8
"""Largest number of connections at one time; further ones are closed."""

SILENCE_S = 10.0
"""Longest wait for a reader that neither asks nor reads [s]."""


class Endpoint:
    """HTTP server of the metrics, on threads beside the process's event loop.

    Args:
        listen: host:port; port 0: the system chooses.

    Raises:
        OSError: the port is in use, or not allowed.
    """

    def __init__(self, listen: str) -> None:
        host, port = parse_address(listen)
        family = socket.AF_INET6 if ":" in host else socket.AF_INET
        self._server = _Server((host, port), family)
        self.address = f"{bracketed(host)}:{self._server.server_address[1]}"
        self._thread: threading.Thread | None = None

    def serve(self, registry: CollectorRegistry, readers: Readers | None) -> None:
        """Answer from now on; None: everyone on this machine may read."""
        self._server.registry, self._server.readers = registry, readers
        poll = {"poll_interval": 0.1}
        self._thread = threading.Thread(target=self._server.serve_forever, kwargs=poll, name="metrics", daemon=True)
        self._thread.start()

    def close(self) -> None:
        """Stop answering, and free the port."""
        if self._thread is not None:
            self._server.shutdown()
            self._thread.join()
        self._server.server_close()


class _Server(ThreadingHTTPServer):
    """Server of one page, with a bound on its connections."""

    daemon_threads = True
    block_on_close = False
    registry: CollectorRegistry
    readers: Readers | None = None

    def __init__(self, address: tuple[str, int], family: socket.AddressFamily) -> None:
        self.address_family = family
        self.collecting = threading.Lock()
        self._free = threading.BoundedSemaphore(CALLS_MAX)
        super().__init__(address, _Handler)

    def process_request(self, request: Any, client_address: Any) -> None:
        """Begin a thread for a connection, or close it if there are too many."""
        if not self._free.acquire(blocking=False):
            self.shutdown_request(request)
            return
        super().process_request(request, client_address)

    def process_request_thread(self, request: Any, client_address: Any) -> None:
        """Serve a connection; its handshake is on the thread of the connection, and delays no other one."""
        try:
            request.settimeout(SILENCE_S)
            if self.readers is not None:
                request = self.readers.context().wrap_socket(request, server_side=True)
            super().process_request_thread(request, client_address)
        except OSError:
            self.shutdown_request(request)
        finally:
            self._free.release()

    def handle_error(self, request: Any, client_address: Any) -> None:
        """Log a fault of ours; a reader that is gone is none."""
        if not isinstance(sys.exception(), OSError):
            logger.exception("a scrape of the metrics has failed")


class _Handler(BaseHTTPRequestHandler):
    """Handler of one connection."""

    server: _Server
    timeout = SILENCE_S
    server_version, sys_version = "atoll", ""

    def do_GET(self) -> None:
        """Answer with the metrics, in the form that the reader accepts."""
        readers = self.server.readers
        if readers is not None and (why := readers.refusal(self.connection.getpeercert(binary_form=True))):
            return self._answer(403, "text/plain; charset=utf-8", f"{why}\n".encode())
        if readers is None and not _is_here(self.headers.get("Host", "")):  # a page whose name leads to this machine
            return self._answer(403, "text/plain; charset=utf-8", b"allowed as Host: 127.0.0.1, localhost or [::1]\n")
        if self.path.partition("?")[0] != PATH:
            return self._answer(404, "text/plain; charset=utf-8", f"the metrics are at {PATH}\n".encode())
        encode, content_type = choose_encoder(self.headers.get("Accept") or "")
        try:
            with self.server.collecting:
                body = encode(self.server.registry)
        except ReadingFailed as error:
            return self._answer(503, "text/plain; charset=utf-8", f"{error}\n".encode())
        return self._answer(200, content_type, body)

    def _answer(self, code: int, content_type: str, body: bytes) -> None:
        self.send_response(code)
        self.send_header("Content-Type", content_type)
        self.send_header("Content-Length", str(len(body)))
        self.send_header("Cache-Control", "no-store")
        self.end_headers()
        self.wfile.write(body)

    def log_message(self, format: str, *args: Any) -> None:
        """Log nothing: a scrape is no event."""


def _is_here(host: str) -> bool:
    """Return whether a Host header names this machine's loopback."""
    has_port = host.rpartition(":")[2].isdigit() and not host.endswith("]")
    try:
        loopback_only(host if has_port else f"{host}:1")
    except ValueError:
        return False
    return True
