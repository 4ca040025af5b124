"""The reader of a run's journal from any process, in bounded batches from an entry or the newest snapshot.

Between two batches no transaction is open, so a slow consumer disturbs nothing. A reader that is too slow for the
deletion of old entries reports the gap, and continues at the newest snapshot.
"""

import time
from collections.abc import Callable, Iterator

from sqlalchemy import Connection, select

from atoll.ground.printable import count_of
from atoll.server.errors import DatabaseAway, StoreCorrupted
from atoll.server.following.follower import ExchangeFollower, RoundFollower
from atoll.server.following.items import Item, Jumped, Waiting
from atoll.server.journal.exchanges import read_exchange_base
from atoll.server.journal.recovery import JournaledEvent, last_seq, read_base, read_entries
from atoll.server.journal.rows import RunRow
from atoll.server.journal.schema import RUNS
from atoll.server.views.history import History

ENTRIES_AT_ONCE = 200
"""Number of entries in memory at one time."""

POLL_MIN_S, POLL_MAX_S = 0.1, 1.0
"""Wait between two checks of the journal [s], which doubles while there is no new entry."""


class Reader:
    """Reader of one run; `follower` has the state after the entries that it has yielded.

    Args:
        history: the history of the state directory or the database.
        run: the run.
        after: the entry after which the items begin; None: the newest snapshot.
        at_once: number of entries in memory at one time.
    """

    def __init__(
        self, history: History, run: RunRow, after: int | None = None, *, at_once: int = ENTRIES_AT_ONCE
    ) -> None:
        self._history, self._run, self._at_once = history, run, at_once
        self._after = after
        self.follower: RoundFollower | ExchangeFollower | None = None

    @property
    def has_ended(self) -> bool:
        """Return whether the run has ended, as far as it has been read."""
        return self.follower is not None and self.follower.has_ended

    def items(self) -> Iterator[Item]:
        """Yield the items of all entries now in the journal, and then the open round.

        Raises:
            LookupError: the run has been deleted.
            OSError: see `History.read`; the next call continues after the last item.
        """
        if self.follower is None:
            yield from self._begin()
        assert self.follower is not None
        while True:
            entries, last = self._look(self.follower.seq)
            for entry in entries:
                yield self.follower.receive(entry.seq, entry.at, entry.event)
            if not entries and last != self.follower.seq:
                yield from self._jump(self.follower.seq, last)
            elif not entries:
                break
        yield from self.follower.open_rounds()

    def _look(self, seq: int) -> tuple[list[JournaledEvent], int]:
        """Read the entries after the entry `seq` (empty if the next one is missing), and the number of the last one."""
        return self._history.read(lambda connection: self._look_in(connection, seq))

    def _look_in(self, connection: Connection, seq: int) -> tuple[list[JournaledEvent], int]:
        run_id = self._run.run_id
        entries = read_entries(connection, run_id, seq, self._at_once)
        if entries and entries[0].seq == seq + 1:
            return entries, entries[-1].seq
        last = last_seq(connection, run_id)
        if not last and connection.scalar(select(RUNS.c.run_id).where(RUNS.c.run_id == run_id)) is None:
            raise LookupError(f"run {run_id} has been deleted")
        return [], last

    def _begin(self) -> Iterator[Item]:
        """Begin at the newest snapshot, or after the given entry: replay up to it, without items."""
        after = self._after
        follower = self._from_snapshot(after)
        while after is not None:
            entries, last = self._look(follower.seq)
            if not entries and (follower.seq < after or last != after):
                yield from self._jump(after, last)
                return
            if follower.seq == after:
                break
            for entry in entries[: after - follower.seq]:
                follower.receive(entry.seq, entry.at, entry.event)
        self.follower = follower
        yield follower.began()

    def _from_snapshot(self, most: int | None = None) -> RoundFollower | ExchangeFollower:
        """Return a follower with the state of the newest snapshot, up to the entry `most`."""
        run = self._run
        if run.config.is_of_messages:
            base = self._history.read(lambda connection: read_exchange_base(connection, run.run_id, most=most))
            return ExchangeFollower(run.run_id, run.config.exchange_rules, base.ledger, base.seq)
        of_rounds = self._history.read(lambda connection: read_base(connection, run.run_id, most=most))
        return RoundFollower(run.run_id, run.rules, of_rounds.ledger, of_rounds.seq)

    def _jump(self, after: int, last: int) -> Iterator[Item]:
        """Continue from the newest snapshot: the entries after `after` are gone, or the journal is older than expected.

        Raises:
            StoreCorrupted: no snapshot can replace the missing entries.
        """
        run_id, is_older = self._run.run_id, last < after
        follower = self._from_snapshot()
        if not is_older and follower.seq <= after:
            raise StoreCorrupted(f"run {run_id}: an entry between {min(follower.seq, after)} and {last} is missing")
        self.follower = follower
        why = (
            f"the journal ends with entry {last}, before entry {after}: it was restored from a backup, or "
            f"replaced; this continues from entry {follower.seq}"
            if is_older
            else f"{count_of(follower.seq - after, 'entry', 'entries')} after entry {after} had been deleted before "
            f"they were read; this continues from entry {follower.seq}, and `atoll round list` has the rounds between"
        )
        yield Jumped(after, follower.seq, why)
        yield follower.began()


def follow(
    history: History, run: RunRow, after: int | None = None, *, wait: Callable[[float], None] = time.sleep
) -> Iterator[Item]:
    """Yield the items of a run as its journal grows, until the run has ended.

    While no process runs the run, or the database server is away, it reports this once and waits.

    Args:
        history: the history of the state directory or the database.
        run: the run.
        after: the entry after which the items begin; None: the newest snapshot.
        wait: waits for some seconds.

    Raises:
        LookupError: the run has been deleted.
        OSError: the journal cannot be read.
    """
    reader, why, poll = Reader(history, run, after), "", POLL_MIN_S
    while True:
        is_news = False
        try:
            for item in reader.items():
                is_news = True
                yield item
            if reader.has_ended:
                return
            now_why = "" if history.is_attended() else "no coordinator runs this run: start it, and the run continues"
        except DatabaseAway as error:
            now_why = str(error)
        if now_why != why:
            why = now_why
            yield Waiting(why)
        poll = POLL_MIN_S if is_news else min(POLL_MAX_S, 2 * poll)
        wait(poll)
