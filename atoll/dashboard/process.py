"""The process of a dashboard: it reads at low priority, and ends with a signal."""

import asyncio
import os
import socket
import ssl
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass, replace
from pathlib import Path

import uvicorn
from uvicorn.protocols.http.h11_impl import H11Protocol, RequestResponseCycle

from atoll.dashboard.access import (
    CERTIFICATE,
    CertificateDoor,
    Door,
    Guard,
    LoopbackDoor,
    Readers,
    Sessions,
    new_key,
    new_token,
)
from atoll.dashboard.app import Dashboard
from atoll.dashboard.listener import DEFAULT, TUNNEL, Listener, announced, bound, listener_of, runtime_folder
from atoll.dashboard.proxied import SCHEME, ProxyDoor, Users, header_of, listening_at, path_of
from atoll.dashboard.sources import Source, only_state, sources
from atoll.ground.process.heap import share_heaps_among_threads
from atoll.interface.errors import AtollError
from atoll.interface.places import readers_of

NICE = 10
"""Niceness of the process: what it shows comes first."""

END_S = 2
"""Seconds that open streams have at the end."""

HEADERS_BYTES_MAX = 32 * 1024
"""Largest size of the headers of a request."""

HEADERS_S = 10.0
"""Seconds in which a connection sends the headers of its first or next request: a silent one keeps no place."""

CONNECTIONS_MAX = 256
"""Largest number of connections at one time; further requests get 503."""


class _Protocol(H11Protocol):
    """HTTP on a connection, whose requests know the certificate of its handshake."""

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        """Begin a connection, of which a TLS handshake is complete."""
        super().connection_made(transport)
        if (connection := transport.get_extra_info("ssl_object")) is not None:
            self.app_state = {**self.app_state, CERTIFICATE: connection.getpeercert(binary_form=True)}
        self.loop.call_later(HEADERS_S, self._end_if_silent, self.cycle)

    def on_response_complete(self) -> None:
        """Wait for the next request."""
        super().on_response_complete()
        self.loop.call_later(HEADERS_S, self._end_if_silent, self.cycle)

    def _end_if_silent(self, newest: RequestResponseCycle | None) -> None:
        """Close the connection if no request has followed the newest one, which is answered."""
        if self.cycle is newest and (newest is None or newest.response_complete):
            self.transport.close()


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


@dataclass(frozen=True)
class Wanted:
    """How pages are served.

    Args:
        listen: the address: HOST:PORT, or `unix:PATH`.
        is_live: whether pages change by themselves.
        is_controlled: whether there are forms that change runs and members.
        user_header: the header in which a proxy names its user; empty: there is no proxy.
        users: the file of the users' roles; empty: as above.
    """

    listen: str
    is_live: bool = True
    is_controlled: bool = False
    user_header: str = ""
    users: str = ""


@dataclass(frozen=True)
class Opened:
    """An open listener.

    Args:
        socket: its socket.
        door: the way by which visitors come in.
        address: what a person opens, or what a proxy is told.
        link: a link that works once; empty: there is none.
        readers: the check of visitors' certificates; None: there is no TLS.
    """

    socket: socket.socket
    door: Door
    address: str
    link: str = ""
    readers: Readers | None = None


def serve(
    places: Sequence[str],
    wanted: Wanted,
    *,
    ready: Callable[[str, str], None],
    ends: Callable[[Callable[[], object]], object],
) -> None:
    """Serve the pages of some places until a signal comes.

    Args:
        places: the places; empty: those of the current folder.
        wanted: how they are served.
        ready: is told the address and a link that works once, when the pages can be opened; empty: there is none.
        ends: is given the function that begins the end, within the running loop.

    Raises:
        AtollError: a place is none, or the address cannot be used.
    """
    os.nice(max(0, NICE - os.nice(0)))
    share_heaps_among_threads()
    found = sources(places)
    dashboard = Dashboard(found, is_live=wanted.is_live, is_controlled=wanted.is_controlled)
    with _opened(wanted, found) as opened:
        config = _config(dashboard.app(opened.door), opened.readers)
        server = _Server(config, lambda: ready(opened.address, opened.link))

        async def until_stopped() -> None:
            ends(server.end)
            await server.serve([opened.socket])

        asyncio.run(until_stopped())


def _opened(wanted: Wanted, found: Sequence[Source]) -> AbstractContextManager[Opened]:
    """Return the listener that is wanted; raises AtollError."""
    if wanted.listen.startswith(SCHEME):
        return _behind_proxy(wanted)
    if wanted.user_header or wanted.users:
        raise AtollError(
            f"--user-header and --users: got --listen {wanted.listen}; allowed: with --listen unix:PATH, where a proxy "
            "alone connects: anyone can send a header to a port"
        )
    listener = listener_of(wanted.listen)
    if listener.is_loopback:
        return _on_loopback(listener)
    if wanted.is_controlled:
        raise AtollError(
            f"--control: got --listen {wanted.listen}; allowed: an address on loopback, such as {DEFAULT}, or "
            f"unix:PATH: a change has the credential of the person at this machine; {TUNNEL}"
        )
    return _with_certificates(listener, found)


@contextmanager
def _behind_proxy(wanted: Wanted) -> Iterator[Opened]:
    faults = list[str]()
    path, header, users = Path(), "", None
    with _noting(faults):
        path = path_of(wanted.listen)
    with _noting(faults):
        header = header_of(wanted.user_header)
    with _noting(faults):
        users = Users(wanted.users)
    if faults or users is None:
        raise AtollError(*faults)
    with listening_at(path) as listening:
        yield Opened(listening, ProxyDoor(users, header), wanted.listen)


@contextmanager
def _noting(faults: list[str]) -> Iterator[None]:
    try:
        yield
    except AtollError as error:
        faults += error.faults


@contextmanager
def _on_loopback(listener: Listener) -> Iterator[Opened]:
    listening, here = bound(listener)
    key = new_key()
    door = LoopbackDoor(Sessions(key), here.hosts, time.time, here.cookie)
    with listening, announced(here, key, runtime_folder()):
        yield Opened(listening, door, f"http://{here.netloc}/", here.url(new_token(key, time.time())))


@contextmanager
def _with_certificates(listener: Listener, found: Sequence[Source]) -> Iterator[Opened]:
    readers = readers_of(only_state(found))
    listening, here = bound(listener)
    with listening:
        door = CertificateDoor(readers, here.host)
        yield Opened(listening, door, f"https://{_reached(here, readers)}/", readers=readers)


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
