"""The connection to the coordinator: a sequence of sessions, and the messages that wait for the next one."""

import asyncio
import logging
import math
import random
from collections import deque
from collections.abc import Callable, Coroutine
from dataclasses import dataclass
from typing import Any

import grpc

from atoll.client.disk.verifier import Verifier
from atoll.client.wire.control_stream import Link
from atoll.client.wire.ranks import Ranks
from atoll.protocol import atoll_pb2 as pb
from atoll.protocol.displaced import Displaced
from atoll.protocol.identity.dialer import Dialer
from atoll.protocol.identity.handshake_fault import explained, is_handshake_failure
from atoll.protocol.identity.renewal import MembershipEnded
from atoll.protocol.identity.statement import NotTrusted
from atoll.protocol.wire.stream import StreamBroken

logger = logging.getLogger(__name__)

WHY_MAX = 200
"""Largest length of the reason, in characters, that a notice gives for a missing session."""

OF_CLOCK = "the clock of site "
"""Prefix of the sentence with which the coordinator refuses a site whose clock differs."""

UNSENT_MAX = 100
"""Number of reports that wait for a connection; a newer one replaces the oldest."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ConnectionHandlers:
    """Handlers of the agent, all called on the event loop."""

    hello: Callable[[], pb.Hello]
    """Makes the first message of the next session."""
    on_connected: Callable[[pb.Welcome], None]
    """Receives the coordinator's Welcome, verified."""
    on_message: Callable[[pb.ServerMessage], None]
    """Receives each further message, unverified."""
    on_lost: Callable[[], None]
    """Learns that a session has ended, or could not be opened."""


class CoordinatorConnection:
    """Connection that dials on request and reports events to its handlers.

    Args:
        address: the address of the coordinator.
        dialer: opens the channels, to the coordinator and its ranks.
        handlers: the agent's side.
        displaced_wait: the first wait before dialling again while another agent has this client's name [s].
        spawn: runs a coroutine whose failure ends the agent.
        verifier: checks the coordinator's signatures; None: the connection is `--insecure`, and nothing is signed.
    """

    def __init__(
        self,
        address: str,
        dialer: Dialer,
        handlers: ConnectionHandlers,
        *,
        displaced_wait: float,
        spawn: Callable[[Coroutine[Any, Any, None]], asyncio.Task[None]],
        verifier: Verifier | None,
    ) -> None:
        self._address, self._dialer, self._handlers = address, dialer, handlers
        self._spawn, self._verifier = spawn, verifier
        self.ranks = Ranks(dialer, spawn)
        self._link: Link | None = None
        self._is_up = asyncio.Event()
        self._session: asyncio.Task[None] | None = None
        self._timer: asyncio.TimerHandle | None = None
        self._unsent: deque[pb.ClientMessage] = deque(maxlen=UNSENT_MAX)
        self._is_hanging_up = self._is_over = False
        self._displaced, self._displaced_wait = Displaced(displaced_wait, random.SystemRandom()), 0.0
        self._complaint = ""
        self.why = ""
        """Cause of the last session's end, or of the failed attempt to open one, while none is open."""

    @property
    def is_refused_for_clock(self) -> bool:
        """Whether the coordinator refuses this site because their clocks differ."""
        return self.why.startswith(OF_CLOCK)

    @property
    def current(self) -> Link | None:
        """The open session; None if there is none."""
        return self._link

    async def link(self) -> Link:
        """Wait until a session is open, and return it."""
        while self._link is None:
            await self._is_up.wait()
        return self._link

    def dial(self, delay: float) -> None:
        """Open a session after `delay` seconds."""
        delay, self._displaced_wait = max(delay, self._displaced_wait), 0.0
        self._timer = asyncio.get_running_loop().call_later(delay, self._begin)

    def send(self, message: pb.ClientMessage) -> None:
        """Send a message now, or as soon as a session is open."""
        if self._link is None:
            self._unsent.append(message)
        else:
            self._link.send(message)

    def renew(self) -> None:
        """Move new calls to connections with the renewed certificate."""
        self.ranks.renew()
        if self._link is not None:
            self._link.connection.renew()

    def leave(self) -> None:
        """End the open session after the current message; the next session compares the clocks again."""
        self._is_over = True

    async def hang_up(self) -> None:
        """Say goodbye in the open session, if there is one, and never dial again."""
        self._is_hanging_up = True
        if self._timer is not None:
            self._timer.cancel()
        if self._link is not None:
            await self._link.close(goodbye=True)
        if self._session is not None:
            self._session.cancel()
            await asyncio.wait({self._session})
        await self.ranks.close()

    def _begin(self) -> None:
        self._session = self._spawn(self._run_session())

    async def _run_session(self) -> None:
        """Run one session, from Hello to its end."""
        link = Link(self._dialer, self._address)
        rotating, clock, held_since = None, asyncio.get_running_loop().time, math.inf
        end = StreamBroken(grpc.StatusCode.OK, "the coordinator has ended the stream")
        try:
            first = await link.open(self._handlers.hello())
            if self._verifier is not None:
                self._verifier.welcome(first)
            welcome = first.welcome
            self._link, self._complaint, self.why, held_since = link, "", "", clock()
            rotating = self._spawn(link.connection.keep_fresh())
            self.ranks.update(welcome.ranks.addresses)
            self._is_up.set()
            self._handlers.on_connected(welcome)
            while self._unsent:
                link.send(self._unsent.popleft())
            await self._receive(link)
        except StreamBroken as error:
            end = error
        except NotTrusted as error:
            end = StreamBroken(grpc.StatusCode.UNAUTHENTICATED, f"the coordinator's Welcome is not trusted: {error}")
            await link.decline(str(error))  # otherwise it would wait for work of this client
        finally:
            self._displaced.held_for(clock() - held_since)
            self._link = None
            self._is_up.clear()
            if rotating is not None:
                rotating.cancel()
            await link.close()
        if not self._is_hanging_up:
            if end.is_revoked:
                raise MembershipEnded([f"{end.detail}: this agent ends; it needs a new join code"])
            await self._explain(end)
            self._handlers.on_lost()

    async def _receive(self, link: Link) -> None:
        self._is_over = False
        while (message := await link.receive()) is not None:
            if message.WhichOneof("message") == "ranks":
                self._on_ranks(message)
            else:
                self._handlers.on_message(message)
            if self._is_over:
                raise StreamBroken(
                    grpc.StatusCode.OK, "a message with a wrong time arrived: the clocks are compared again"
                )

    def _on_ranks(self, message: pb.ServerMessage) -> None:
        if self._verifier is not None and (refused := self._verifier.check(message, None)) is not None:
            logger.warning("refused: addresses of the aggregation ranks: %s: %s", refused.reason, refused.detail)
            return
        self.ranks.update(message.ranks.addresses)

    async def _explain(self, end: StreamBroken) -> None:
        """Log why the session ended, as a warning once for each cause in a row."""
        self.why = end.detail if end.detail.startswith(OF_CLOCK) else str(end)[:WHY_MAX]
        if end.is_displaced:
            wait = self._displaced_wait = self._displaced.next_wait()
            level = logging.WARNING if self._displaced.is_news else logging.DEBUG
            logger.log(level, "another agent uses this site's name: %s; trying again in %.1f s", end.detail, wait)
            return
        if (complaint := cause_of(end)) == self._complaint:
            logger.debug("no connection to %s: %s; trying again", self._address, end)
            return
        self._complaint = complaint
        text = end.detail if end.code is grpc.StatusCode.OK else str(end)  # the stream ended cleanly
        why = await explained(text, self._address, self._dialer.credential)
        logger.warning("no connection to %s: %s; trying again", self._address, why)


def cause_of(end: StreamBroken) -> str:
    """Return the cause of a failed attempt, "TLS" or a status code; details with the same remedy share a cause."""
    is_tls = end.code is grpc.StatusCode.UNAVAILABLE and is_handshake_failure(end.detail)
    return "TLS" if is_tls else end.code.name
