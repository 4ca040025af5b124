"""The open control streams: one connection for each client, with the messages that wait for it."""

import asyncio
from collections.abc import Iterator
from dataclasses import dataclass, field

from atoll.protocol.atoll_pb2 import ServerMessage
from atoll.protocol.vocabulary import ClientId
from atoll.server.members.member import Profile
from atoll.server.names.conflicts import UNKNOWN, Claimant

OUTBOX_MAX = 256
"""Number of messages that may wait for one client; a client that does not read loses its connection and reconnects."""

CLOCK_NEWS_S = 0.5
"""Smallest change of an agent's clock that is reported: smaller ones come from the delay of its messages [s]."""

CLOCK_MAX = 253402300800.0
"""Begin of the year 10000 [s since the epoch]; no clock shows it, and no date is written for it."""

CLIENT_ENDED = "the client ended its stream"
"""Reason of a connection that has ended without a dismissal."""

DISMISS_S = 5.0
"""Time that a client has to read why its stream ends [s]."""


@dataclass(slots=True, eq=False)
class Connection:
    """Control stream of one client. `session` is the random name that the client gave it."""

    client_id: ClientId
    session: str
    tasks: frozenset[str]
    profile: Profile
    codecs: frozenset[str] = frozenset()  # codecs that the client supports
    software: str = ""  # software of its agent
    claimant: Claimant = UNKNOWN  # its process, with the address
    gives_statistics: bool = False  # whether its agent answers AskStatistics
    spreads_parts: bool = False  # whether its agent understands `Invite.spreads`
    takes_messages: bool = False  # whether its agent answers messages of a server program
    takes_notices: bool = False  # whether its agent logs a Notice
    joins_sessions: bool = False  # whether its agent joins the sessions of secure sums
    clock_offset: float | None = None  # its agent's clock minus this machine's [s]; None: an older agent
    certificate_until: float | None = None  # [s since the epoch]; None: it has none
    since: float = 0.0  # [s since the epoch]
    outbox: "asyncio.Queue[ServerMessage | None]" = field(default_factory=lambda: asyncio.Queue(OUTBOX_MAX + 1))
    is_closing: bool = False
    why: str = ""
    handler: "asyncio.Task[None] | None" = None  # the task that serves the call

    def note_clock(self, clock: float, now: float) -> None:
        """Record the agent's clock from a newly arrived message; both in seconds since the epoch, 0: not stated."""
        if not 0 < clock < CLOCK_MAX:
            return
        if self.clock_offset is None or abs(clock - now - self.clock_offset) > CLOCK_NEWS_S:
            self.clock_offset = clock - now

    def send(self, message: ServerMessage) -> None:
        """Queue a message without waiting for the client."""
        if self.is_closing:
            return
        if self.outbox.qsize() >= OUTBOX_MAX:
            self.close("the client does not read its messages")
            return
        self.outbox.put_nowait(message)

    def close(self, why: str) -> None:
        """End the stream after the queued messages."""
        if not self.is_closing:
            self.is_closing, self.why = True, why
            self.outbox.put_nowait(None)

    def break_off(self) -> None:
        """End the stream at once; unread messages are lost."""
        if self.handler is not None:
            self.handler.cancel()


class Hub:
    """Register of the control streams: the newest connection of each client."""

    def __init__(self) -> None:
        self._connections: dict[ClientId, Connection] = {}
        self._is_empty = asyncio.Event()
        self._is_empty.set()

    def __len__(self) -> int:
        return len(self._connections)

    def __contains__(self, client_id: object) -> bool:
        return client_id in self._connections

    def __iter__(self) -> Iterator[Connection]:
        return iter(list(self._connections.values()))

    def add(self, connection: Connection) -> None:
        """Register a connection and close the client's older one, which may be half dead and must not keep the name."""
        older = self._connections.get(connection.client_id)
        if older is not None:
            here = connection.claimant.address
            older.close(f"replaced by a newer connection of {connection.client_id}, from {here}")
        self._connections[connection.client_id] = connection
        self._is_empty.clear()

    def of(self, client_id: ClientId) -> Connection | None:
        """Return the connection of a client; None if it is not connected."""
        return self._connections.get(client_id)

    def holder(self, client_id: ClientId) -> Claimant | None:
        """Return the process that holds the client's stream; None if the client is not connected."""
        connection = self._connections.get(client_id)
        return None if connection is None or connection.is_closing else connection.claimant

    async def empty(self) -> None:
        """Wait until no client is connected."""
        await self._is_empty.wait()

    def remove(self, connection: Connection) -> bool:
        """Remove a connection whose stream has ended; return False if a newer one has replaced it."""
        if self._connections.get(connection.client_id) is not connection:
            return False
        del self._connections[connection.client_id]
        if not self._connections:
            self._is_empty.set()
        return True

    def dismiss(self, client_id: ClientId, why: str) -> None:
        """Close the client's stream, if there is one, and break it off after DISMISS_S."""
        if (connection := self._connections.get(client_id)) is not None:
            connection.close(why)
            asyncio.get_running_loop().call_later(DISMISS_S, connection.break_off)

    def codecs_of(self, client_id: ClientId) -> frozenset[str]:
        """Return the codecs that a client supports; empty if it is not connected."""
        connection = self._connections.get(client_id)
        return frozenset() if connection is None else connection.codecs

    def spreads_parts(self, client_id: ClientId) -> bool:
        """Return whether a client can send the parts of an update to several ranks."""
        connection = self._connections.get(client_id)
        return connection is not None and connection.spreads_parts

    def send(self, client_id: ClientId, message: ServerMessage) -> None:
        """Send a message to a client if it is connected; the machine repeats important ones when it reconnects."""
        if (connection := self._connections.get(client_id)) is not None:
            connection.send(message)
