"""The bytes of arriving updates: each is a sign of life of its client, their sum is the progress in views."""

from collections.abc import AsyncIterator, Callable, Iterable
from dataclasses import dataclass, field
from typing import TypeVar

from atoll.ground.bounded_mapping import BoundedMapping
from atoll.protocol import atoll_pb2 as pb
from atoll.protocol.vocabulary import ClientId, Digest, RoundId, RunId

T = TypeVar("T")

UPDATES_MAX = 4096
"""Number of updates under way that are remembered; the one that waited longest for a byte is forgotten."""

Key = tuple[RunId, RoundId, ClientId]


@dataclass(slots=True)
class _Coming:
    """Arriving update, in one or several streams."""

    digest: Digest
    total: int
    places: dict[int, int] = field(default_factory=dict)  # received bytes, by part or by aggregation rank


def no_sign(client_id: ClientId) -> None:
    """Ignore a sign of life."""


class Arrivals:
    """Updates that are arriving.

    Args:
        on_sign: called with the client when bytes have arrived.
    """

    def __init__(self, on_sign: Callable[[ClientId], None] = no_sign) -> None:
        self.on_sign = on_sign
        self._coming: BoundedMapping[Key, _Coming] = BoundedMapping(UPDATES_MAX)
        self._news: set[Key] = set()
        self._signs: set[ClientId] = set()

    def came(self, key: Key, digest: Digest, total: int, *, place: int, num_bytes: int) -> None:
        """Record the received bytes of an update.

        Args:
            key: the run, the round and the client.
            digest: the digest of the update's manifest; a new digest starts the count again.
            total: size of the whole update [bytes].
            place: the part; at a coordinator with aggregation ranks the rank.
            num_bytes: total bytes received at this place.
        """
        coming = self._coming.get(key)
        if coming is None or coming.digest != digest:
            coming = self._coming[key] = _Coming(digest, total)
        coming.places[place] = num_bytes
        self._news.add(key)
        self.on_sign(key[2])

    def sign(self, client_id: ClientId) -> None:
        """Record a sign of life without bytes of an update: a download accepts bytes."""
        self._signs.add(client_id)
        self.on_sign(client_id)

    async def signs_of(self, requests: AsyncIterator[T], client_id: ClientId) -> AsyncIterator[T]:
        """Yield the messages with which a client accepts a download, each of them a sign of life."""
        async for request in requests:
            self.sign(client_id)
            yield request

    def over(self, key: Key, digest: Digest) -> None:
        """Forget a decided update."""
        if (coming := self._coming.get(key)) is not None and coming.digest == digest:
            del self._coming[key]
            self._news.discard(key)

    def bytes_of(self, key: Key) -> tuple[int, int] | None:
        """Return the received bytes and the total of an update; None: it is not arriving."""
        coming = self._coming.get(key)
        return None if coming is None else (min(sum(coming.places.values()), coming.total), coming.total)

    def all(self) -> dict[Key, tuple[int, int]]:
        """Return the received bytes, and the total, of every arriving update."""
        return {key: found for key in list(self._coming) if (found := self.bytes_of(key)) is not None}

    # ------------------------------------------------------------ between an aggregation rank and the coordinator

    def report(self) -> list[pb.Arrival]:
        """Return the bytes received since the last report, for the coordinator."""
        news, self._news, signs, self._signs = self._news, set(), self._signs, set()
        rows = [
            pb.Arrival(
                run_id=key[0],
                round_id=key[1],
                client_id=key[2],
                digest=coming.digest,
                num_bytes=sum(coming.places.values()),
                total_bytes=coming.total,
            )
            for key in sorted(news)
            if (coming := self._coming.get(key)) is not None
        ]
        return [*rows, *(pb.Arrival(client_id=client_id) for client_id in sorted(signs))]

    def reported(self, rank: int, rows: Iterable[pb.Arrival]) -> None:
        """Handle the report of an aggregation rank."""
        for row in rows:
            key = RunId(row.run_id), RoundId(row.round_id), ClientId(row.client_id)
            if row.digest:
                self.came(key, Digest(row.digest), row.total_bytes, place=rank, num_bytes=row.num_bytes)
            else:
                self.on_sign(key[2])
