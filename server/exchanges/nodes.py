"""The nodes of a run of messages: the clients that have joined it, and the messages that wait for each. Pure."""

from collections import deque
from dataclasses import dataclass, field

from atoll.protocol.vocabulary import ClientId, RoundId
from atoll.server.rounds.events import ClientJoined


@dataclass(slots=True)
class Node:
    """Client that has joined the run at least once."""

    session: str | None = None
    """The name of its open control stream."""
    is_lost: bool = False
    """Whether its lease has expired, or it has left; otherwise it is connected, or may reconnect within its lease."""
    software: str = ""
    counted: RoundId = RoundId(0)  # noqa: RUF009
    """Its newest message with an accepted reply: the node's state from that message is current."""
    queue: deque[RoundId] = field(default_factory=deque)
    """Messages that have not ended; the first one is at the node, which answers them in order."""


@dataclass(slots=True)
class Nodes:
    """All nodes of a run, by client."""

    members: dict[ClientId, Node] = field(default_factory=dict)

    def joined(self, event: ClientJoined) -> Node:
        """Record a control stream, which replaces an older one of the client, and return its node."""
        node = self.members.setdefault(event.client_id, Node())
        node.session, node.is_lost, node.software = event.session, False, event.software
        return node

    def disconnected(self, client_id: ClientId, session: str) -> None:
        """Record the end of a control stream, unless a newer one has replaced it."""
        node = self.members.get(client_id)
        if node is not None and node.session == session:
            node.session = None

    def lost(self, client_id: ClientId) -> None:
        """Record the loss of a client, which may join again."""
        if (node := self.members.get(client_id)) is not None:
            node.session, node.is_lost = None, True

    def everyone_disconnected(self) -> None:
        """Record that the coordinator has restarted: no client is connected, and each has a fresh lease.

        So the program finds the same nodes as before: if it had to wait for their connections, a restart would change
        which nodes it uses.
        """
        for node in self.members.values():
            node.session = None

    @property
    def present(self) -> tuple[ClientId, ...]:
        """The clients that are connected or within their lease, sorted."""
        return tuple(sorted(client_id for client_id, node in self.members.items() if not node.is_lost))

    def takes(self, client_id: ClientId) -> bool:
        """Return whether a message can reach a client: it has joined, and is not lost."""
        node = self.members.get(client_id)
        return node is not None and not node.is_lost

    def has_declined(self, client_id: ClientId) -> bool:
        """Return False: a refused message is an error reply, and the next one is delivered all the same."""
        return False
