"""The control streams that stand: who is on the line, and what is to be sent to each."""

import asyncio
from collections.abc import Iterator
from dataclasses import dataclass, field

from atoll.protocol.atoll_pb2 import ServerMessage
from atoll.protocol.vocabulary import ClientId
from atoll.server.rounds.events import Profile

OUTBOX_MAX = 256
"""Messages that wait for one client; one that does not read loses its connection and starts afresh."""

DISMISS_S = 5.0
"""Seconds that a client has to read why its stream is ended."""


@dataclass(slots=True, eq=False)
class Connection:
    """One control stream. The session is the client's own random name for it."""

    client_id: ClientId
    session: str
    tasks: frozenset[str]
    profile: Profile
    codecs: frozenset[str] = frozenset()  # that the client speaks
    outbox: "asyncio.Queue[ServerMessage | None]" = field(default_factory=lambda: asyncio.Queue(OUTBOX_MAX + 1))
    is_closing: bool = False
    why: str = ""
    handler: "asyncio.Task[None] | None" = None  # of the call

    def send(self, message: ServerMessage) -> None:
        """Hand a message over; never waits for the client."""
        if self.is_closing:
            return
        if self.outbox.qsize() >= OUTBOX_MAX:
            self.close("the client does not read its messages")
            return
        self.outbox.put_nowait(message)

    def close(self, why: str) -> None:
        """End the stream after what is in the outbox."""
        if not self.is_closing:
            self.is_closing, self.why = True, why
            self.outbox.put_nowait(None)

    def break_off(self) -> None:
        """End the stream at once, whatever the client has not read."""
        if self.handler is not None:
            self.handler.cancel()


class Hub:
    """The newest connection of each client."""

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
        """The newest wins: an older one may be half dead and must not own the client's name."""
        older = self._connections.get(connection.client_id)
        if older is not None:
            older.close(f"replaced by a newer connection of {connection.client_id}")
        self._connections[connection.client_id] = connection
        self._is_empty.clear()

    async def empty(self) -> None:
        """Wait until nobody is on the line."""
        await self._is_empty.wait()

    def remove(self, connection: Connection) -> bool:
        """The stream ended; False when a newer one had taken its place."""
        if self._connections.get(connection.client_id) is not connection:
            return False
        del self._connections[connection.client_id]
        if not self._connections:
            self._is_empty.set()
        return True

    def dismiss(self, client_id: ClientId, why: str) -> None:
        """End the client's stream, if it stands; at the latest soon."""
        if (connection := self._connections.get(client_id)) is not None:
            connection.close(why)
            asyncio.get_running_loop().call_later(DISMISS_S, connection.break_off)

    def codecs_of(self, client_id: ClientId) -> frozenset[str]:
        """What a client speaks; nothing when it is not on the line."""
        connection = self._connections.get(client_id)
        return frozenset() if connection is None else connection.codecs

    def send(self, client_id: ClientId, message: ServerMessage) -> None:
        """To the client, when it is on the line; the machine repeats what matters when it comes back."""
        if (connection := self._connections.get(client_id)) is not None:
            connection.send(message)
