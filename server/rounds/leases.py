"""The leases of silent clients. Pure."""

import heapq

from atoll.protocol.vocabulary import ClientId


class Leases:
    """Who has been silent for too long. Not journaled: only its verdict is.

    A lazy heap: each client has one entry, re-pushed when it is found to have been heard since. O(log n) per client
    and lease, and nothing per heartbeat but one dictionary write.
    """

    def __init__(self, lease_s: float) -> None:
        self.lease_s = lease_s
        self._heard: dict[ClientId, float] = {}
        self._due: list[tuple[float, ClientId]] = []
        self._queued: set[ClientId] = set()  # who has an entry in the heap

    def heard(self, client_id: ClientId, now: float) -> None:
        """The client gave a sign of life."""
        if client_id not in self._queued:
            self._queued.add(client_id)
            heapq.heappush(self._due, (now + self.lease_s, client_id))
        self._heard[client_id] = now

    def forget(self, client_id: ClientId) -> None:
        """The client said goodbye: nothing is expected of it."""
        self._heard.pop(client_id, None)

    @property
    def next_due(self) -> float | None:
        """When to ask `expired` again; None while nobody is watched."""
        return self._due[0][0] if self._due else None

    def expired(self, now: float) -> list[ClientId]:
        """Those whose lease ran out by now; each is named once and then no longer watched."""
        gone = []
        while self._due and self._due[0][0] <= now:
            _, client_id = heapq.heappop(self._due)
            if client_id in self._heard and (due := self._heard[client_id] + self.lease_s) > now:
                heapq.heappush(self._due, (due, client_id))
                continue
            self._queued.discard(client_id)
            if self._heard.pop(client_id, None) is not None:
                gone.append(client_id)
        return gone
