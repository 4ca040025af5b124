"""The line to the coordinator: one connection after the other, and what is to be said over whichever stands."""

import asyncio
import logging
from collections import deque
from collections.abc import Callable, Coroutine
from typing import Any

import grpc

from atoll.client.disk.verifier import Verifier
from atoll.client.wire.control_stream import Link
from atoll.client.wire.ranks import Ranks
from atoll.protocol import atoll_pb2 as pb
from atoll.protocol.identity.dialer import Dialer
from atoll.protocol.identity.renewal import MembershipEnded
from atoll.protocol.identity.statement import NotTrusted
from atoll.protocol.wire.stream import StreamBroken

logger = logging.getLogger(__name__)

UNSENT_MAX = 100
"""Reports that wait for a connection; the oldest give way."""

OF_TLS = "Tls handshake failed", "verification check failed"
"""In gRPC's words, with the code UNAVAILABLE, as a coordinator that is down has it: an end is not who it should be."""


class Line:
    """Dials when it is told to, and tells what happens.

    Args:
        address: of the coordinator.
        dialer: opens the channels, to the coordinator and its ranks.
        replaced_wait: seconds before dialling again after another agent has taken this client's name.
        hello: the first message of the next connection.
        on_connected, on_message, on_lost: called on the event loop.
        verifier: of what the coordinator says; None: the line is `--insecure`, and nothing is signed.
        spawn: runs a coroutine whose failure ends the agent.
    """

    def __init__(
        self,
        address: str,
        dialer: Dialer,
        *,
        replaced_wait: float,
        hello: Callable[[], pb.Hello],
        on_connected: Callable[[pb.Welcome], None],
        on_message: Callable[[pb.ServerMessage], None],
        on_lost: Callable[[], None],
        spawn: Callable[[Coroutine[Any, Any, None]], asyncio.Task[None]],
        verifier: Verifier | None,
    ) -> None:
        self._verifier = verifier
        self._address, self._dialer, self._replaced_wait = address, dialer, replaced_wait
        self.ranks = Ranks(dialer, spawn)
        self._hello, self._on_connected, self._on_message, self._on_lost = hello, on_connected, on_message, on_lost
        self._spawn = spawn
        self._link: Link | None = None
        self._is_up = asyncio.Event()
        self._talk: asyncio.Task[None] | None = None
        self._timer: asyncio.TimerHandle | None = None
        self._unsent: deque[pb.ClientMessage] = deque(maxlen=UNSENT_MAX)
        self._is_replaced = self._is_hanging_up = False
        self._complaint = ""

    @property
    def current(self) -> Link | None:
        """The connection that stands; None when none does."""
        return self._link

    async def link(self) -> Link:
        """Wait until a connection stands."""
        while self._link is None:
            await self._is_up.wait()
        return self._link

    def dial(self, delay: float) -> None:
        """Open a connection after so many seconds."""
        if self._is_replaced:
            delay, self._is_replaced = max(delay, self._replaced_wait), False
        self._timer = asyncio.get_running_loop().call_later(delay, self._begin)

    def send(self, message: pb.ClientMessage) -> None:
        """Say it now, or as soon as a connection stands."""
        if self._link is None:
            self._unsent.append(message)
        else:
            self._link.send(message)

    def renew(self) -> None:
        """Prove anew who one is, in whatever is begun from now on: the certificate has been renewed."""
        self.ranks.renew()
        if self._link is not None:
            self._link.connection.renew()

    async def hang_up(self) -> None:
        """Say goodbye if a connection stands, and dial no more."""
        self._is_hanging_up = True
        if self._timer is not None:
            self._timer.cancel()
        if self._link is not None:
            await self._link.close(goodbye=True)
        if self._talk is not None:
            self._talk.cancel()
            await asyncio.wait({self._talk})
        await self.ranks.close()

    def _begin(self) -> None:
        self._talk = self._spawn(self._connection())

    async def _connection(self) -> None:
        """One connection, from Hello to its end."""
        link = Link(self._dialer, self._address)
        staying_fresh = None
        end = StreamBroken(grpc.StatusCode.OK, "the coordinator has ended the stream")
        try:
            first = await link.open(self._hello())
            if self._verifier is not None:
                self._verifier.welcome(first)
            welcome = first.welcome
            self._link, self._complaint = link, ""
            staying_fresh = self._spawn(link.connection.keep_fresh())
            self.ranks.update(welcome.ranks.addresses)
            self._is_up.set()
            self._on_connected(welcome)
            while self._unsent:
                link.send(self._unsent.popleft())
            while (message := await link.receive()) is not None:
                if message.WhichOneof("message") == "ranks":
                    self._on_ranks(message)
                else:
                    self._on_message(message)
        except StreamBroken as error:
            end = error
        except NotTrusted as error:
            end = StreamBroken(grpc.StatusCode.UNAUTHENTICATED, f"the coordinator's Welcome is not trusted: {error}")
        finally:
            self._link = None
            self._is_up.clear()
            if staying_fresh is not None:
                staying_fresh.cancel()
            await link.close()
        if not self._is_hanging_up:
            if end.is_revoked:
                raise MembershipEnded([f"{end.detail}: this agent ends; it takes a new join code"])
            self._explain(end)
            self._on_lost()

    def _on_ranks(self, message: pb.ServerMessage) -> None:
        if self._verifier is not None and (refused := self._verifier.check(message, None)) is not None:
            logger.warning("refused: where the aggregation ranks are: %s: %s", refused.reason, refused.detail)
            return
        self.ranks.update(message.ranks.addresses)

    def _explain(self, end: StreamBroken) -> None:
        """Tell the operator why, once for each reason in a row."""
        self._is_replaced = end.is_replaced
        if end.is_replaced:
            logger.warning(
                "another agent uses this site's name: %s; trying again in %g s", end.detail, self._replaced_wait
            )
            return
        complaint = cause_of(end)
        level = logging.DEBUG if complaint == self._complaint else logging.WARNING
        logger.log(level, "no connection to %s: %s; trying again", self._address, end)
        self._complaint = complaint


def cause_of(end: StreamBroken) -> str:
    """What is to be done about it, coarsely: the same for all attempts that fail alike, whatever their detail names."""
    is_of_tls = end.code is grpc.StatusCode.UNAVAILABLE and any(words in end.detail for words in OF_TLS)
    return "TLS" if is_of_tls else end.code.name
