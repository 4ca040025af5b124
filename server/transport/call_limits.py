"""The limits of calls per caller: an interceptor refuses excessive calls, and ends connections that bring few others.

The rules are `limits.Callers`; this is the shell around them.
"""

import asyncio
import logging
import time
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager, suppress
from typing import Any
from urllib.parse import unquote

import grpc

from atoll.server.transport.interceptor import Context, Interceptor, code_of
from atoll.server.transport.limits import Callers
from atoll.server.transport.peer import peer_of
from atoll.server.transport.sockets import Place, connected_to, open_sockets, shut_down_if

logger = logging.getLogger(__name__)

RANKS = "/atoll.v1.Aggregation/"
"""Methods that aggregation ranks call, for all of their clients at once. They are not counted; any other caller is
denied them, and gets a strike."""

LOOKING_SHARE = 0.05
"""Largest share of the event loop's time for scans of all open sockets, of which there may be thousands."""
TELL_S = 60.0
"""Shortest time between two log lines about ended connections [s]."""

STRIKES = frozenset(
    {grpc.StatusCode.INVALID_ARGUMENT, grpc.StatusCode.UNAUTHENTICATED, grpc.StatusCode.PERMISSION_DENIED}
)
"""Status codes with which calls of an honest client rarely end."""


class CallLimits(Interceptor):
    """Interceptor that counts the calls of each caller and refuses those beyond its limits with RESOURCE_EXHAUSTED.

    Args:
        callers: the limits.
        end_connection: called with the peer of a connection that has brought too many refused calls.
    """

    def __init__(self, callers: Callers, end_connection: Callable[[str], None]) -> None:
        super().__init__(self._limited)
        self._callers, self._end_connection = callers, end_connection

    @asynccontextmanager
    async def _limited(self, method: str, request: Any, context: Context) -> AsyncIterator[None]:
        name, is_counted = name_of(context), not method.startswith(RANKS)
        if is_counted and (fault := self._callers.begin(name, time.monotonic())):
            self._strike(name, context)
            await context.abort(grpc.StatusCode.RESOURCE_EXHAUSTED, fault)
        try:
            yield
        finally:
            if is_counted:
                self._callers.end(name)
            if code_of(context) in STRIKES:
                self._strike(name, context)

    def _strike(self, name: str, context: Context) -> None:
        if self._callers.strike(name, time.monotonic()):
            self._end_connection(context.peer())


def name_of(context: Context) -> str:
    """Return the name in the caller's certificate; without one its address, or its connection on an insecure port."""
    peer = peer_of(context)
    if peer is not None:
        return str(peer.identity)
    return _address_of(context.peer()) if "transport_security_type" in context.auth_context() else context.peer()


def _address_of(peer: str) -> str:
    return peer.rpartition(":")[0]


class Connections:
    """Killer of connections: it shuts down their sockets, because gRPC has no call for it but notices this.

    This happens at once, because each call still queued on such a connection costs as much as a refused one; and on the
    event loop, because a thread would wait for its turn at each socket.
    """

    def __init__(self) -> None:
        self._doomed: set[Place] = set()
        self._peers: dict[str, Place | None] = {}
        self._count, self._tell_at = 0, 0.0
        self._work: asyncio.Task[None] | None = None

    def end(self, peer: str) -> None:
        """End the connection of a peer, named as gRPC does, soon."""
        if (where := place_of(peer)) is None:
            return
        self._doomed.add(where)
        if self._work is None or self._work.done():
            self._work = asyncio.get_running_loop().create_task(self._end_doomed())

    async def _end_doomed(self) -> None:
        while self._doomed:
            doomed, self._doomed, begun = self._doomed, set(), time.monotonic()
            self._count += self._shut_down(doomed)
            if self._count and begun >= self._tell_at:
                logger.warning("ended %d connections: nearly all of their calls were refused", self._count)
                self._count, self._tell_at = 0, begun + TELL_S
            await asyncio.sleep((time.monotonic() - begun) / LOOKING_SHARE)

    def _shut_down(self, doomed: set[Place]) -> int:
        """Shut down this process's sockets to these peers; return their number."""
        before, self._peers, count = self._peers, {}, 0
        for number, name in open_sockets():
            with suppress(OSError):  # closed meanwhile, or not connected
                peer = self._peers[name] = before[name] if name in before else connected_to(number)
                if peer in doomed:  # checked again: another socket may have this number by now
                    count += shut_down_if(number, lambda _, peer: peer in doomed)
        return count


def place_of(peer: str) -> Place | None:
    """Return address and port of a peer such as `ipv4:127.0.0.1:4711` or `ipv6:%5B::1%5D:4711`."""
    scheme, _, rest = peer.partition(":")
    host, _, port = unquote(rest).rpartition(":")
    if scheme not in ("ipv4", "ipv6") or not port.isdecimal():
        return None
    return host.removeprefix("[").removesuffix("]"), int(port)
