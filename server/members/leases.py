"""The leases of silent clients. Pure."""

import heapq
import math

from atoll.protocol.vocabulary import ClientId


class Leases:
    """Lease of each client, renewed by its signs of life. The leases are not journaled; only a loss is.

    A lazy heap: each client has one entry, which is pushed again if it comes due after a renewal, and a second entry if
    its lease was longer before. A lease costs O(log n) for each client, a heartbeat one write to a dictionary.
    """

    def __init__(self, lease_s: float) -> None:
        self.lease_s = lease_s
        self._heard: dict[ClientId, float] = {}
        self._ends: dict[ClientId, float] = {}
        self._due: list[tuple[float, ClientId]] = []
        self._queued: dict[ClientId, float] = {}  # the earliest entry of each client in the heap

    def heard(self, client_id: ClientId, now: float) -> None:
        """Renew the client's lease after a sign of life."""
        self._heard[client_id] = now
        self._end_at(client_id, now + self.lease_s)

    def renew(self, client_id: ClientId, now: float) -> None:
        """Renew a lease by the bytes of a transfer; a lost client must connect again first."""
        if client_id in self._heard:
            self.heard(client_id, now)

    def expect(self, client_id: ClientId, until: float) -> None:
        """Start the lease of a client that has not connected yet; it expires at `until`."""
        self._end_at(client_id, until)

    def _end_at(self, client_id: ClientId, end: float) -> None:
        self._ends[client_id] = end
        if end < self._queued.get(client_id, math.inf):
            self._queued[client_id] = end
            heapq.heappush(self._due, (end, client_id))

    def heard_at(self, client_id: ClientId) -> float:
        """Return the instant of the client's last sign of life [s since the epoch]; 0: it has no lease."""
        return self._heard.get(client_id, 0.0)

    def forget(self, client_id: ClientId) -> None:
        """End the client's lease without a loss, after it has left."""
        self._heard.pop(client_id, None)
        self._ends.pop(client_id, None)

    @property
    def next_due(self) -> float | None:
        """The time at which to call `expired` again [s since the epoch]; None: there are no leases."""
        return self._due[0][0] if self._due else None

    def expired(self, now: float) -> list[ClientId]:
        """Return the clients whose lease has expired, each once, and end their leases."""
        lost = []
        while self._due and self._due[0][0] <= now:
            entry, client_id = heapq.heappop(self._due)
            if entry != self._queued.get(client_id):
                continue  # an earlier entry has replaced it
            del self._queued[client_id]
            if (end := self._ends.get(client_id, -math.inf)) > now:
                self._end_at(client_id, end)
            elif client_id in self._ends:
                self.forget(client_id)
                lost.append(client_id)
        return lost
