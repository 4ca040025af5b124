"""The aggregation ranks as seen by the coordinator: connections, the assignment of clients, folds by all ranks.

A rank dials the coordinator, as clients do, and receives the updates of the clients that are assigned to it. Decisions
about updates are made here (`update_judge`); their bytes never arrive here. All ranks fold a round together. If one is
lost, the fold restarts as soon as all are back; the bits do not depend on this.
"""

import asyncio
import logging
import secrets
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field

from atoll.aggregation.masked.no_sum import NoSum
from atoll.protocol import atoll_pb2 as pb
from atoll.protocol.log_fields import number_of
from atoll.protocol.vocabulary import Digest, RoundId, RunId
from atoll.protocol.wire.channel import CHUNK_BYTES
from atoll.server.errors import UpdateDamaged
from atoll.server.names.conflicts import UNKNOWN, Claimant
from atoll.server.names.places import RANK, Places
from atoll.server.ranks.spread_parts import SpreadParts
from atoll.server.transfers.arrivals import Arrivals

logger = logging.getLogger(__name__)

STATUS_S = 1.0
"""Interval between two reports of a rank [s]."""

AGAIN_S = 0.5
"""Wait before an aborted fold restarts [s]."""


class RanksAway(OSError):
    """Error: a rank did not come back in time."""


class FoldRefused(ValueError):
    """Error: a rank reports that these updates cannot be folded."""


@dataclass(slots=True, eq=False)
class RankConnection:
    """Stream of one rank."""

    rank: int
    address: str
    store_address: str
    outbox: "asyncio.Queue[pb.RankOrder | None]" = field(default_factory=asyncio.Queue)
    done: pb.RankStatus = field(default_factory=pb.RankStatus)
    claimant: Claimant = UNKNOWN  # its process
    codecs: frozenset[str] = frozenset()  # codecs that it has
    heard_at: float = 0.0  # time of its last message [s since the epoch]
    why: str = ""  # reason of its end, if the coordinator caused it

    def send(self, order: pb.RankOrder) -> None:
        """Queue an order to the rank."""
        self.outbox.put_nowait(order)

    def close(self, why: str = "") -> None:
        """End the stream after the queued orders."""
        self.why = self.why or why
        self.outbox.put_nowait(None)


class Ranks:
    """All aggregation ranks of a coordinator, 1 to 64 of them.

    Args:
        num_ranks: the number of ranks.
        on_change: called when a rank has come or gone.
        places: the places of the ranks.
        arrivals: counts the bytes that arrive at the ranks.
        on_full: called with the run and the rank's message, as long as the rank's disk has no room for it.
    """

    def __init__(
        self,
        num_ranks: int,
        on_change: Callable[[], None],
        places: Places,
        arrivals: Arrivals | None = None,
        on_full: Callable[[RunId, str], None] = lambda run_id, detail: None,
    ) -> None:
        self._on_full = on_full
        self._arrivals = arrivals or Arrivals()
        self.num_ranks, self._on_change, self._places = num_ranks, on_change, places
        self._present: dict[int, RankConnection] = {}
        self._changed = asyncio.Event()
        self._next_rank = 0
        self._collects: dict[str, pb.RankOrder] = {}  # the last order for each run, for absent ranks
        self._attempt: _Attempt | None = None
        self._folding = asyncio.Lock()  # one fold at a time
        self.parts = SpreadParts()
        """Updates in parts that the ranks receive."""

    # ------------------------------------------------------------ connections

    def addresses(self) -> pb.Ranks:
        """Return the addresses of all data planes, for clients; "" for a rank that is away."""
        here = self._present
        return pb.Ranks(addresses=[here[rank].address if rank in here else "" for rank in range(self.num_ranks)])

    def rows(self) -> list[pb.RankRow]:
        """Return the last report of each rank."""
        return [self._row(rank) for rank in range(self.num_ranks)]

    def _row(self, rank: int) -> pb.RankRow:
        conflict = self._places.sentence(RANK, str(rank))
        if (here := self._present.get(rank)) is None:
            return pb.RankRow(rank=rank, conflict=conflict)
        done = here.done
        return pb.RankRow(
            rank=rank,
            address=here.address,
            received_bytes=done.received_bytes,
            sent_bytes=done.sent_bytes,
            exchanged_bytes=done.exchanged_bytes,
            conflict=conflict,
            certificate_until=done.certificate_until,
        )

    def assign(self) -> int:
        """Assign a rank to one more client, round-robin over the connected ranks, or over all if none is."""
        in_turn = [(self._next_rank + step) % self.num_ranks for step in range(self.num_ranks)]
        rank = next((rank for rank in in_turn if rank in self._present), in_turn[0])
        self._next_rank = (rank + 1) % self.num_ranks
        return rank

    def are_full(self, run_id: RunId) -> bool:
        """Return whether the disk of a connected rank has no room for a run, by the rank's last report."""
        return any(each.run_id == run_id for here in self._present.values() for each in here.done.shortages)

    def codecs_of(self, rank: int) -> frozenset[str] | None:
        """Return the codecs of a rank; None while it is away."""
        return self._present[rank].codecs if rank in self._present else None

    def refusal_of(self, connection: RankConnection) -> str:
        """Return the reason why a process does not get the place of its rank; empty: it may `join`."""
        older = self._present.get(connection.rank)
        holder, heard_at = (None, 0.0) if older is None else (older.claimant, older.heard_at)
        return self._places.enter(RANK, str(connection.rank), connection.claimant, holder, heard_at)

    def join(self, connection: RankConnection) -> None:
        """Register the stream of a rank, and close an older stream of the same rank."""
        if (older := self._present.get(connection.rank)) is not None:
            older.close(f"replaced by a newer connection of rank {older.rank}, from {connection.claimant.address}")
            self._gone(older)
        self._present[connection.rank] = connection
        connection.send(pb.RankOrder(welcome=pb.RankWelcome(status_s=STATUS_S)))
        for order in self._collects.values():
            connection.send(order)
        logger.info("aggregation rank %d is connected, its data plane is %s", connection.rank, connection.address)
        self._notify()

    def leave(self, connection: RankConnection) -> None:
        """Remove the stream of a rank that has ended."""
        if self._present.get(connection.rank) is connection:
            del self._present[connection.rank]
            self._places.leave(RANK, str(connection.rank))
            self._gone(connection)
            logger.warning("aggregation rank %d is away", connection.rank)
            self._notify()

    def collect(self, collect: pb.Collect) -> None:
        """Order every rank to collect garbage; an absent rank gets the order when it connects."""
        order = self._collects[collect.run_id] = pb.RankOrder(collect=collect)
        self._broadcast(order)

    def _broadcast(self, order: pb.RankOrder) -> None:
        for connection in self._present.values():
            connection.send(order)

    def close(self) -> None:
        """End all streams."""
        for connection in self._present.values():
            connection.close()

    def _notify(self) -> None:
        self._changed.set()
        self._changed = asyncio.Event()
        self._on_change()

    async def all_here(self, patience: float) -> list[RankConnection]:
        """Wait until every rank is connected.

        Raises:
            RanksAway: a rank has not connected within `patience` [s].
        """
        try:
            async with asyncio.timeout(patience):
                while len(self._present) < self.num_ranks:
                    await self._changed.wait()
        except TimeoutError:
            away = ", ".join(str(rank) for rank in range(self.num_ranks) if rank not in self._present)
            raise RanksAway(f"aggregation rank {away} of {self.num_ranks} has been away for {patience:g} s") from None
        return [self._present[rank] for rank in range(self.num_ranks)]

    # ------------------------------------------------------------ a fold

    async def fold(self, run_id: RunId, round_id: RoundId, plan: bytes, *, patience: float) -> list[pb.Folded]:
        """Order all ranks to fold a round, in as many attempts as needed.

        Args:
            run_id: the run.
            round_id: the round.
            plan: the encoded plan (`FoldPlan.encode`).
            patience: the time that a rank may be away [s].

        Returns:
            The written shard of each rank.

        Raises:
            RanksAway: a rank did not come back.
            FoldRefused: the updates cannot be folded.
            UpdateDamaged: an update is missing or damaged at a rank.
        """
        async with self._folding:
            while True:
                connections = await self.all_here(patience)
                attempt = self._attempt = _Attempt(secrets.randbits(63), len(connections), self._break_off)
                for order in _orders(run_id, round_id, attempt.number, connections[0].store_address, plan):
                    for connection in connections:
                        connection.send(order)
                try:
                    return await attempt.done
                except _Again as why:
                    logger.warning("the fold of round %d is started again: %s", round_id, why)
                finally:
                    self._attempt = None
                await asyncio.sleep(AGAIN_S)

    def _break_off(self, attempt: int) -> None:
        """Order all ranks to give up an attempt, in which one of them is missing."""
        self._broadcast(pb.RankOrder(break_off=attempt))

    def heard(self, connection: RankConnection, message: pb.RankMessage) -> None:
        """Handle a message of a rank."""
        connection.heard_at = self._places.now()
        match message.WhichOneof("message"):
            case "status":
                connection.done = message.status
                self._arrivals.reported(connection.rank, message.status.arrivals)
                for shortage in message.status.shortages:
                    self._on_full(RunId(shortage.run_id), f"aggregation rank {connection.rank}: {shortage.detail}")
                connection.store_address = message.status.store_address or connection.store_address
            case "folded":
                if (attempt := self._current(message.folded.attempt)) is not None:
                    attempt.folded(connection.rank, message.folded)
            case "fold_failed":
                failed = message.fold_failed
                if (attempt := self._current(failed.attempt)) is not None:
                    damaged = Digest(failed.damaged.hex()) if failed.damaged else None
                    cause: Exception | None = NoSum(failed.dropped) if failed.dropped else None
                    if damaged is not None:
                        cause = UpdateDamaged(damaged, f"rank {connection.rank}: {failed.detail}")
                    attempt.failed(connection.rank, failed.detail, again=failed.again, cause=cause)
            case _:
                pass

    def _current(self, number: int) -> "_Attempt | None":
        """Return the attempt of this number unless it has been given up."""
        return self._attempt if self._attempt is not None and self._attempt.number == number else None

    def _gone(self, connection: RankConnection) -> None:
        if self._attempt is not None:
            self._attempt.failed(connection.rank, "it is away", again=True)


def _orders(run_id: RunId, round_id: RoundId, attempt: int, store_address: str, plan: bytes) -> Iterator[pb.RankOrder]:
    """Yield an order to fold as bounded messages: a plan may be long."""
    last = max(0, len(plan) - 1) // CHUNK_BYTES * CHUNK_BYTES
    for start in range(0, last, CHUNK_BYTES):
        yield pb.RankOrder(plan_part=plan[start : start + CHUNK_BYTES])
    fold = pb.Fold(run_id=run_id, round_id=round_id, attempt=attempt, store_address=store_address, plan=plan[last:])
    fold.run_number = number_of(run_id)
    yield pb.RankOrder(fold=fold)


class _Again(Exception):
    """Error: the attempt has failed; the next one may succeed."""


class _Attempt:
    """One attempt of all ranks at one fold. A fault of the updates takes precedence over ranks that stop after it.

    Args:
        number: a number that no other attempt has.
        num_ranks: the number of ranks that must fold.
        break_off: called with the number at the first failure, so that the other ranks stop.
    """

    def __init__(self, number: int, num_ranks: int, break_off: Callable[[int], None]) -> None:
        self.number, self._break_off = number, break_off
        self.done: asyncio.Future[list[pb.Folded]] = asyncio.get_running_loop().create_future()
        self._folded: list[pb.Folded | None] = [None] * num_ranks
        self._broken: dict[int, str] = {}

    def folded(self, rank: int, folded: pb.Folded) -> None:
        """Record that a rank has written its shard."""
        self._folded[rank] = folded
        self._settle()

    def failed(self, rank: int, detail: str, *, again: bool, cause: Exception | None = None) -> None:
        """Record that a rank has failed, or is gone; a shard that it has already written remains.

        Args:
            rank: the rank.
            detail: the reason.
            again: whether another attempt may succeed.
            cause: the error to raise; None: `FoldRefused` with the reason.
        """
        if self.done.done() or self._folded[rank] is not None:
            return
        if not self._broken:
            self._break_off(self.number)
        self._broken.setdefault(rank, detail)
        if again:
            self._settle()
        else:
            self.done.set_exception(cause or FoldRefused(f"rank {rank}: {detail}"))

    def _settle(self) -> None:
        """Finish when all have answered, including those that stopped: the first failure may not be the cause."""
        answered = [folded for folded in self._folded if folded is not None]
        if self.done.done() or len(answered) + len(self._broken) < len(self._folded):
            return
        if self._broken:
            rank, detail = next(iter(self._broken.items()))
            self.done.set_exception(_Again(f"rank {rank}: {detail}"))
        else:
            self.done.set_result(answered)
