"""The aggregation ranks as the coordinator sees them: who is there, which client goes to which, and a fold by all.

A rank dials the coordinator, as clients do, and receives the updates of the clients that are assigned to it. What is
decided about an update is decided here (`judge`); its bytes never come here. A round is folded by all ranks together;
when one is gone the fold is begun again as soon as all are back, and the bits do not depend on that.
"""

import asyncio
import itertools
import logging
import secrets
from collections.abc import Callable
from dataclasses import dataclass, field

from atoll.protocol import atoll_pb2 as pb
from atoll.protocol.vocabulary import RoundId, RunId

logger = logging.getLogger(__name__)

STATUS_S = 1.0
"""Seconds between the reports of a rank."""

AGAIN_S = 0.5
"""Seconds before a fold that was broken off is begun again."""


class RanksAway(OSError):
    """Not all ranks came back in time."""


class FoldRefused(ValueError):
    """A rank says that these updates cannot be folded."""


@dataclass(slots=True, eq=False)
class RankConnection:
    """The stream of one rank."""

    rank: int
    address: str
    store_address: str
    outbox: "asyncio.Queue[pb.RankOrder | None]" = field(default_factory=asyncio.Queue)
    received_bytes: int = 0
    sent_bytes: int = 0

    def send(self, order: pb.RankOrder) -> None:
        """Hand an order over."""
        self.outbox.put_nowait(order)

    def close(self) -> None:
        """End the stream after what is in the outbox."""
        self.outbox.put_nowait(None)


class Ranks:
    """All aggregation ranks of a coordinator, 1 to 64 of them.

    Args:
        num_ranks: how many there must be.
        on_change: called when one has come or gone.
    """

    def __init__(self, num_ranks: int, on_change: Callable[[], None]) -> None:
        self.num_ranks, self._on_change = num_ranks, on_change
        self._present: dict[int, RankConnection] = {}
        self._changed = asyncio.Event()
        self._next_rank = itertools.cycle(range(num_ranks))
        self._fold: _Attempt | None = None

    # ------------------------------------------------------------ who is there

    def addresses(self) -> pb.Ranks:
        """Where clients find them."""
        here = self._present
        return pb.Ranks(addresses=[here[rank].address if rank in here else "" for rank in range(self.num_ranks)])

    def rows(self) -> list[pb.RankRow]:
        """What each has done."""
        return [
            pb.RankRow(rank=rank, address=c.address, received_bytes=c.received_bytes, sent_bytes=c.sent_bytes)
            if (c := self._present.get(rank)) is not None
            else pb.RankRow(rank=rank)
            for rank in range(self.num_ranks)
        ]

    def assign(self) -> int:
        """The rank for one more client: each in turn, of those that are here."""
        candidates = itertools.islice(self._next_rank, self.num_ranks)
        return next((rank for rank in candidates if rank in self._present), 0)

    def join(self, connection: RankConnection) -> None:
        """A rank is here; a newer stream takes an older one's place."""
        if (older := self._present.get(connection.rank)) is not None:
            older.close()
            self._gone(older)
        self._present[connection.rank] = connection
        connection.send(pb.RankOrder(welcome=pb.RankWelcome(status_s=STATUS_S)))
        logger.info("aggregation rank %d is here, its data plane on %s", connection.rank, connection.address)
        self._notify()

    def leave(self, connection: RankConnection) -> None:
        """A rank's stream ended."""
        if self._present.get(connection.rank) is connection:
            del self._present[connection.rank]
            self._gone(connection)
            logger.warning("aggregation rank %d is away", connection.rank)
            self._notify()

    def broadcast(self, order: pb.RankOrder) -> None:
        """Tell all that are here."""
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
            RanksAway: not within so many seconds.
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
        """Let all ranks fold a round, as often as it takes.

        Args:
            run_id: of the run.
            round_id: of the round.
            plan: `FoldPlan.encode`.
            patience: seconds that a rank may be away.

        Returns:
            What each rank has written.

        Raises:
            RanksAway: one did not come back.
            FoldRefused: the updates cannot be folded.
        """
        while True:
            connections = await self.all_here(patience)
            attempt = self._fold = _Attempt(run_id, secrets.randbits(63), len(connections))
            order = pb.Fold(
                run_id=run_id,
                round_id=round_id,
                attempt=attempt.number,
                store_address=connections[0].store_address,
                plan=plan,
            )
            for connection in connections:
                connection.send(pb.RankOrder(fold=order))
            try:
                return await attempt.done
            except _Again as why:
                logger.warning("the fold of round %d is begun again: %s", round_id, why)
            finally:
                self._fold = None
            await asyncio.sleep(AGAIN_S)

    def heard(self, connection: RankConnection, message: pb.RankMessage) -> None:
        """What a rank says."""
        match message.WhichOneof("message"):
            case "status":
                connection.received_bytes = message.status.received_bytes
                connection.sent_bytes = message.status.sent_bytes
            case "folded":
                if self._is_current(message.folded.attempt):
                    self._fold_of().folded(connection.rank, message.folded)
            case "fold_failed":
                failed = message.fold_failed
                if self._is_current(failed.attempt):
                    self._fold_of().failed(connection.rank, failed.detail, again=failed.again)
            case _:
                pass

    def _is_current(self, attempt: int) -> bool:
        return self._fold is not None and self._fold.number == attempt

    def _fold_of(self) -> "_Attempt":
        assert self._fold is not None
        return self._fold

    def _gone(self, connection: RankConnection) -> None:
        if self._fold is not None:
            self._fold.failed(connection.rank, "it is away", again=True)


class _Again(Exception):
    """The attempt is of no use; the next one may be."""


class _Attempt:
    """One try of all ranks at one fold. What is wrong with the updates outweighs that others then break off."""

    def __init__(self, run_id: RunId, number: int, num_ranks: int) -> None:
        self.run_id, self.number = run_id, number
        self.done: asyncio.Future[list[pb.Folded]] = asyncio.get_running_loop().create_future()
        self._folded: list[pb.Folded | None] = [None] * num_ranks
        self._broken: dict[int, str] = {}

    def folded(self, rank: int, folded: pb.Folded) -> None:
        """A rank has written its shard."""
        self._folded[rank] = folded
        self._settle()

    def failed(self, rank: int, detail: str, *, again: bool) -> None:
        """A rank has not."""
        if again:
            self._broken.setdefault(rank, detail)
            self._settle()
        elif not self.done.done():
            self.done.set_exception(FoldRefused(detail))

    def _settle(self) -> None:
        """Done when all have answered, those that broke off included: the first may have had the reason."""
        answered = [folded for folded in self._folded if folded is not None]
        if self.done.done() or len(answered) + len(self._broken) < len(self._folded):
            return
        if self._broken:
            rank, detail = next(iter(self._broken.items()))
            self.done.set_exception(_Again(f"rank {rank}: {detail}"))
        else:
            self.done.set_result(answered)
