"""The leases of silent clients. Pure."""

import heapq

from atoll.protocol.vocabulary import ClientId


class Leases:
    """The lease of each client, renewed by its signs of life. The leases are not journaled; only a loss is.

    A lazy heap: each client has one entry, which is pushed again when it comes due after a renewal. A lease costs
    O(log n) for each client, a heartbeat one write to a dictionary.
    """

    def __init__(self, lease_s: float) -> None:
        self.lease_s = lease_s
        self._heard: dict[ClientId, float] = {}
        self._due: list[tuple[float, ClientId]] = []
        self._queued: set[ClientId] = set()  # clients with an entry in the heap

    def heard(self, client_id: ClientId, now: float) -> None:
        """Renew the client's lease after a sign of life."""
        if client_id not in self._queued:
            self._queued.add(client_id)
            heapq.heappush(self._due, (now + self.lease_s, client_id))
        self._heard[client_id] = now

    def heard_at(self, client_id: ClientId) -> float:
        """Return the instant of the client's last sign of life [s since the epoch]; 0: it has no lease."""
        return self._heard.get(client_id, 0.0)

    def forget(self, client_id: ClientId) -> None:
        """End the client's lease without a loss, after it has left."""
        self._heard.pop(client_id, None)

    @property
    def next_due(self) -> float | None:
        """The time at which to call `expired` again [s since the epoch]; None: there are no leases."""
        return self._due[0][0] if self._due else None

    def expired(self, now: float) -> list[ClientId]:
        """Return the clients whose lease has run out, each once, and end their leases."""
        lost = []
        while self._due and self._due[0][0] <= now:
            _, client_id = heapq.heappop(self._due)
            if client_id in self._heard and (due := self._heard[client_id] + self.lease_s) > now:
                heapq.heappush(self._due, (due, client_id))
                continue
            self._queued.discard(client_id)
            if self._heard.pop(client_id, None) is not None:
                lost.append(client_id)
        return lost
