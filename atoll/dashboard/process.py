"""The process of a dashboard: it reads at low priority, and ends with a signal."""

import asyncio
import os
import socket
import ssl
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import replace

import uvicorn
from uvicorn.protocols.http.h11_impl import H11Protocol

from atoll.dashboard.access import (
    CERTIFICATE,
    CertificateDoor,
    Guard,
    LoopbackDoor,
    Readers,
    Sessions,
    new_key,
    new_token,
)
from atoll.dashboard.app import Dashboard
from atoll.dashboard.listener import DEFAULT, TUNNEL, Listener, announced, bound, listener_of, runtime_folder
from atoll.dashboard.sources import only_state, sources
from atoll.interface.errors import AtollError
from atoll.interface.places import readers_of

NICE = 10
"""Niceness of the process: what it shows comes first."""

END_S = 2
"""Seconds that open streams have at the end."""

HEADERS_BYTES_MAX = 32 * 1024
"""Largest size of the headers of a request."""


CONNECTIONS_MAX = 256
"""Largest number of connections at one time; further requests get 503."""


class _Protocol(H11Protocol):
    """HTTP on a connection, whose requests know the certificate of its handshake."""

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        """Begin a connection, of which a TLS handshake is complete."""
        super().connection_made(transport)
        if (connection := transport.get_extra_info("ssl_object")) is not None:
            self.app_state = {**self.app_state, CERTIFICATE: connection.getpeercert(binary_form=True)}


class _Server(uvicorn.Server):
    """Server without handlers of signals, as the command has them, which tells when it listens."""

    def __init__(self, config: uvicorn.Config, ready: Callable[[], None]) -> None:
        super().__init__(config)
        self._ready = ready

    @contextmanager
    def capture_signals(self) -> Iterator[None]:
        """Capture none."""
        yield

    async def startup(self, sockets: list[socket.socket] | None = None) -> None:
        """Listen."""
        await super().startup(sockets)
        self._ready()

    def end(self) -> None:
        """Begin the end."""
        self.should_exit = True


def serve(
    places: Sequence[str],
    listen: str,
    *,
    is_live: bool,
    is_controlled: bool,
    ready: Callable[[str, str], None],
    ends: Callable[[Callable[[], object]], object],
) -> None:
    """Serve the pages of some places until a signal comes.

    Args:
        places: the places; empty: those of the current folder.
        listen: the address.
        is_live: whether pages change by themselves.
        is_controlled: whether there are forms that change runs and members.
        ready: is told the address and a link that works once, when the pages can be opened; empty: there is none.
        ends: is given the function that begins the end, within the running loop.

    Raises:
        AtollError: a place is none, or the address cannot be used.
    """
    os.nice(max(0, NICE - os.nice(0)))
    wanted, found = listener_of(listen), sources(places)
    if is_controlled and not wanted.is_loopback:
        raise AtollError(
            f"--control: got --listen {listen}; allowed: an address on loopback, such as {DEFAULT}: a change has the "
            f"credential of the person at this machine; {TUNNEL}"
        )
    readers = None if wanted.is_loopback else readers_of(only_state(found))
    listening, here = bound(wanted)
    dashboard = Dashboard(found, is_live=is_live, is_controlled=is_controlled)
    with ExitStack() as stack:
        stack.enter_context(listening)
        if readers is not None:
            address, link = f"https://{_reached(here, readers)}/", ""
            app = dashboard.app(CertificateDoor(readers, here.host))
        else:
            key = new_key()
            address, link = f"http://{here.netloc}/", here.url(new_token(key, time.time()))
            app = dashboard.app(LoopbackDoor(Sessions(key), here.hosts, time.time, here.cookie))
            stack.enter_context(announced(here, key, runtime_folder()))
        server = _Server(_config(app, readers), lambda: ready(address, link))

        async def until_stopped() -> None:
            ends(server.end)
            await server.serve([listening])

        asyncio.run(until_stopped())


def _reached(here: Listener, readers: Readers) -> str:
    """Return host and port by which browsers reach a listener with TLS without a warning."""
    return replace(here, host=readers.name).netloc


def _config(app: Guard, readers: Readers | None) -> uvicorn.Config:
    config = uvicorn.Config(
        app,
        http=_Protocol,
        log_level="warning",
        log_config=None,
        access_log=False,
        server_header=False,
        date_header=False,
        proxy_headers=False,
        lifespan="off",
        ws="none",
        h11_max_incomplete_event_size=HEADERS_BYTES_MAX,
        limit_concurrency=CONNECTIONS_MAX,
        timeout_graceful_shutdown=END_S,
    )
    config.load()
    if readers is not None:
        config.ssl = readers.context()
        config.ssl.sni_callback = lambda connection, *_: _show_newest(connection, readers)
    return config


def _show_newest(connection: ssl.SSLObject, readers: Readers) -> None:
    """Show the newest certificate in a handshake: OpenSSL asks at each, also at one without a server's name."""
    connection.context = readers.context()
