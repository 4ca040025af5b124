"""The process of a dashboard: it reads at low priority, and ends with a signal."""

import asyncio
import os
import socket
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager

import uvicorn

from atoll.dashboard.access import LoopbackDoor, Sessions, new_key, new_token
from atoll.dashboard.app import Dashboard
from atoll.dashboard.listener import announced, bound, listener_of, runtime_folder
from atoll.dashboard.sources import sources

NICE = 10
"""Niceness of the process: what it shows comes first."""

END_S = 2
"""Seconds that open streams have at the end."""

HEADERS_BYTES_MAX = 32 * 1024
"""Largest size of the headers of a request."""


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
        ready: is told the address and a link that works once, when the pages can be opened.
        ends: is given the function that begins the end, within the running loop.

    Raises:
        AtollError: a place is none, or the address cannot be used.
    """
    os.nice(max(0, NICE - os.nice(0)))
    wanted, found = listener_of(listen), sources(places)
    listening, here = bound(wanted)
    key = new_key()
    door = LoopbackDoor(Sessions(key), here.hosts, time.time, here.cookie)
    config = uvicorn.Config(
        Dashboard(found, is_live=is_live, is_controlled=is_controlled).app(door),
        log_level="warning",
        log_config=None,
        access_log=False,
        server_header=False,
        date_header=False,
        proxy_headers=False,
        lifespan="off",
        ws="none",
        h11_max_incomplete_event_size=HEADERS_BYTES_MAX,
        timeout_graceful_shutdown=END_S,
    )
    server = _Server(config, lambda: ready(f"http://{here.netloc}/", here.url(new_token(key, time.time()))))

    async def until_stopped() -> None:
        ends(server.end)
        await server.serve([listening])

    with listening, announced(here, key, runtime_folder()):
        asyncio.run(until_stopped())
