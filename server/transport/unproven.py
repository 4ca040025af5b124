"""The log of connections that end without a proven identity: gRPC refuses them in silence.

gRPC's Python learns of no failed handshake, but a port is asked for its certificate at the begin of each. At that
moment the new connection is among the open sockets. It is unproven if no call has come over it a while later.
"""

import asyncio
import logging
import time
from collections.abc import Callable, Collection
from contextlib import suppress

from atoll.protocol.bounded_mapping import BoundedMapping
from atoll.protocol.identity.clock_hint import instant
from atoll.protocol.identity.credential import Credential
from atoll.protocol.identity.handshake_fault import own_fault
from atoll.protocol.wire.channel import PROOF_S
from atoll.server.transport.call_limits import place_of
from atoll.server.transport.sockets import Place, open_sockets, places_of
from atoll.server.transport.token_bucket import Bucket

logger = logging.getLogger(__name__)

WAIT_S = PROOF_S + 1.0
"""Time from the begin of a handshake to the first call of its connection [s]; a member dials in order to call."""

AGAIN_S = 600.0
"""The least time between two lines about one host [s]."""

LINES_PER_S, LINES_BURST = 0.1, 10
"""Lines about all hosts: the rate [1/s] and the burst. Strangers must not fill the disk."""

LOOKING_SHARE = 0.02
"""The largest share of the time for looks at all open sockets, of which there may be thousands."""

HOSTS_MAX, CONNECTIONS_MAX = 1000, 10_000
"""Hosts whose last line is remembered, and connections that are watched; further ones are not logged."""


class Unproven:
    """The connections to one port that have made no call yet.

    Args:
        own: returns the credential that the port shows.
        wall: this machine's clock [s since the epoch].
    """

    def __init__(self, own: Callable[[], Credential], wall: Callable[[], float] = time.time) -> None:
        self._own, self._wall, self.port = own, wall, 0
        self._loop: asyncio.AbstractEventLoop | None = None
        self._waiting: set[Place] = set()
        self._known: frozenset[str] = frozenset()
        self._told: BoundedMapping[str, float] = BoundedMapping(HOSTS_MAX)
        self._lines = Bucket(LINES_PER_S, LINES_BURST)
        self._look_at = 0.0

    def watch(self, port: int) -> None:
        """Watch the connections to a port from now on; called on the event loop."""
        self.port, self._loop = port, asyncio.get_running_loop()

    def begun(self) -> None:
        """Look for the connection whose handshake begins; called on a thread of gRPC."""
        begun = time.monotonic()
        if self._loop is None or begun < self._look_at:
            return
        with suppress(OSError, RuntimeError):  # no /proc, or the loop is closed
            found = self._new_connections()
            self._look_at = time.monotonic() + (time.monotonic() - begun) / LOOKING_SHARE
            self._loop.call_soon_threadsafe(self._note, found)

    def proven(self, peer: str) -> None:
        """Note a call of a member over the connection of a peer, named as gRPC does."""
        if self._waiting and (place := place_of(peer)) is not None:
            self._waiting.discard(place)

    def _new_connections(self) -> list[Place]:
        found, names, before = [], [], self._known
        for number, name in open_sockets():
            names.append(name)
            if name not in before:
                with suppress(OSError):  # closed meanwhile, or not connected
                    places = places_of(number)
                    if places is not None and places[0][1] == self.port:
                        found.append(places[1])
        self._known = frozenset(names)
        return found

    def _note(self, found: Collection[Place]) -> None:
        if found and len(self._waiting) < CONNECTIONS_MAX:
            self._waiting.update(found)
            asyncio.get_running_loop().call_later(WAIT_S, self._settle, found)

    def _settle(self, found: Collection[Place]) -> None:
        for place in found:
            if place in self._waiting:
                self._waiting.discard(place)
                self.tell(place, time.monotonic())

    def tell(self, place: Place, now: float) -> None:
        """Log an unproven connection, unless its host was in the log a short while ago.

        Args:
            place: address and port of the peer.
            now: a monotonic clock [s].
        """
        host, port = place
        if now < self._told.get(host, now) or not self._lines.take(now):
            return
        self._told[host] = now + AGAIN_S
        logger.warning("a connection from %s port %d has proven no identity: %s", host, port, self._cause())

    def _cause(self) -> str:
        now = self._wall()
        return own_fault(self._own(), now) or (
            "it did not accept this machine's certificate, or showed none that is valid by this machine's clock, which "
            f"shows {instant(now)}. If it is a member, compare the clocks of the two machines (NTP); its log says more"
        )
