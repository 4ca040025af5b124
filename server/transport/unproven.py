"""The log of connections that end without a proven identity: gRPC refuses them silently.

gRPC does not report failed handshakes to Python, but it asks a port for its certificate at the start of each. At that
moment the new connection is among the open sockets. `handshakes` judges it a while later.
"""

import asyncio
import logging
import time
from collections.abc import Callable, Mapping
from contextlib import suppress

from atoll.protocol.identity.clock_hint import instant
from atoll.protocol.identity.credential import Credential
from atoll.protocol.identity.handshake_fault import own_fault
from atoll.protocol.wire.channel import PROOF_S
from atoll.server.transport.call_limits import place_of
from atoll.server.transport.handshakes import FailedHandshake, Handshakes, Report
from atoll.server.transport.sockets import Place, has_peer_left, open_sockets, places_of

logger = logging.getLogger(__name__)

LOOK_S = 1.0
"""Interval between two checks while a connection waits for its judgement [s]."""

LOOKING_SHARE = 0.02
"""Largest share of the time for scans of all open sockets, of which there may be thousands."""


class Unproven:
    """Connections to one port that have made no call yet, and the log lines about those that never made one.

    Args:
        own: returns the credential that the port shows.
        wall: this machine's clock [s since the epoch].
    """

    def __init__(self, own: Callable[[], Credential], wall: Callable[[], float] = time.time) -> None:
        self._own, self._wall, self.port = own, wall, 0
        self._loop: asyncio.AbstractEventLoop | None = None
        self._handshakes = Handshakes()
        self._known: Mapping[str, tuple[Place, bool] | None] = {}
        self._num_begun = self._num_counted = 0
        self._look_at, self._is_ticking = 0.0, False

    def watch(self, port: int) -> None:
        """Watch the connections to a port from now on; called on the event loop."""
        self.port, self._loop = port, asyncio.get_running_loop()

    def begun(self) -> None:
        """Find the connection whose handshake begins; called on a thread of gRPC, one at a time."""
        self._num_begun += 1
        if self._loop is None:
            return
        with suppress(OSError, RuntimeError):  # no /proc, or the loop is closed
            if time.monotonic() >= self._look_at:
                self._loop.call_soon_threadsafe(self._note, self._connections(), self._num_begun)
            elif not self._is_ticking:
                self._loop.call_soon_threadsafe(self._begin_ticking)

    def proven(self, peer: str) -> None:
        """Record a call of a member over the connection of a peer, named as gRPC does."""
        if (place := place_of(peer)) is not None:
            self._handshakes.proven(place, time.monotonic())

    def _connections(self) -> dict[Place, bool]:
        """Return the open connections of the port, and whether the peer had left when each was first seen."""
        begun, before = time.monotonic(), self._known
        found: dict[str, tuple[Place, bool] | None] = {}
        for number, name in open_sockets():
            if name in before:
                found[name] = before[name]
                continue
            with suppress(OSError):  # closed meanwhile, or not connected
                places = places_of(number)
                is_mine = places is not None and places[0][1] == self.port
                found[name] = (places[1], has_peer_left(number)) if places is not None and is_mine else None
        self._known, self._look_at = found, time.monotonic() + (time.monotonic() - begun) / LOOKING_SHARE
        return dict(filter(None, found.values()))

    def _note(self, is_open: Mapping[Place, bool], num_begun: int) -> None:
        now = time.monotonic()
        if num_begun > self._num_counted:
            self._handshakes.begun(num_begun - self._num_counted, now)
            self._num_counted = num_begun
        self._handshakes.look(is_open, now)
        for report in self._handshakes.due(now):
            self.tell(report)
        self._begin_ticking()

    def _begin_ticking(self) -> None:
        if not self._is_ticking:
            self._is_ticking = True
            asyncio.get_running_loop().call_later(LOOK_S, self._tick)

    def _tick(self) -> None:
        self._is_ticking = False
        num_begun = self._num_begun  # before the scan, which may see more
        if num_begun > self._num_counted or self._handshakes.is_watching:
            with suppress(OSError):
                if time.monotonic() >= self._look_at:
                    self._note(self._connections(), num_begun)
            self._begin_ticking()

    def tell(self, report: Report) -> None:
        """Log the connections of one class."""
        match report.kind:
            case FailedHandshake.LATE:
                text = "%s ended before this process answered, as it was starting or busy, or just before a member of "
                logger.info(text + "the same host was proven: no alarm", report.subject)
            case FailedHandshake.SILENT:
                text = "%s proved no identity within %g s: a stranger that says nothing, or a line that is too slow"
                logger.warning(text, report.subject, PROOF_S)
            case FailedHandshake.REFUSED:
                has = "has" if report.total == 1 else "have"
                logger.warning("%s %s proven no identity: %s", report.subject, has, self._cause())

    def _cause(self) -> str:
        now = self._wall()
        return own_fault(self._own(), now) or (
            "it did not accept this machine's certificate, or showed none that is valid by this machine's clock, which "
            f"shows {instant(now)}. If it is a member, compare the clocks of the two machines (NTP); its log says more"
        )
