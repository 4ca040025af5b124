"""The recovery of a run from the journal: its last good snapshot and the entries since, by their checksums."""

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from itertools import pairwise
from typing import Any, Generic, TypeVar

from sqlalchemy import Connection, Row, Select, func, select

from atoll.ground.printable import count_of
from atoll.protocol.vocabulary import ClientId, RunId
from atoll.server.errors import StoreCorrupted
from atoll.server.exchanges.machine import ExchangeMachine
from atoll.server.journal import checksums
from atoll.server.journal.codec import decode_event, decode_ledger, decode_page
from atoll.server.journal.schema import JOURNAL, MEMBERS, SNAPSHOTS
from atoll.server.members.member import Member
from atoll.server.members.member_pages import CONTENTS
from atoll.server.rounds.ledger import Ledger
from atoll.server.rounds.run_machine import RunMachine
from atoll.server.rounds.run_rules import RunRules

L = TypeVar("L")
M = TypeVar("M", RunMachine, ExchangeMachine)


@dataclass(frozen=True, slots=True)
class JournaledEvent:
    """Event with its time [s since the epoch] and its number in the run."""

    seq: int
    at: float
    event: Any  # of a run of rounds, or of messages


@dataclass(frozen=True, slots=True)
class Recovered(Generic[L]):
    """Last good snapshot of a run (an empty ledger: there is none) and all events since."""

    ledger: L
    snapshot_seq: int
    entries: tuple[JournaledEvent, ...]
    faults: tuple[str, ...] = ()  # about newer snapshots that are damaged, for the operator

    @property
    def seq(self) -> int:
        """The number of the last entry; the next entry has one more."""
        return self.entries[-1].seq if self.entries else self.snapshot_seq

    def replayed(self, machine: M) -> M:
        """Pass all events since the snapshot to the ledger's machine, which changes the ledger; return the machine."""
        for entry in self.entries:
            machine.receive(entry.event, entry.at)
        return machine


@dataclass(frozen=True, slots=True)
class RecoveredRounds(Recovered[Ledger]):
    """Last good snapshot of a run of rounds, and all events since."""

    def replay(self, rules: RunRules) -> RunMachine:
        """Return the machine after the last entry. Call it once: the machine takes the ledger and changes it."""
        return self.replayed(RunMachine(rules, self.ledger))


@dataclass(frozen=True, slots=True)
class Base(Generic[L]):
    """Ledger after the entry `seq`, where a replay begins: from a snapshot, or empty before entry 1."""

    ledger: L
    seq: int
    faults: tuple[str, ...] = ()  # about newer snapshots that are damaged


def recover(connection: Connection, run_id: RunId) -> RecoveredRounds:
    """Read the last good snapshot of a run of rounds and the entries since, within a transaction of the caller.

    Raises:
        StoreCorrupted: a needed entry is missing or damaged.
    """
    base = read_base(connection, run_id)
    return RecoveredRounds(base.ledger, base.seq, entries_since(connection, run_id, base), base.faults)


def entries_since(connection: Connection, run_id: RunId, base: Base[L]) -> tuple[JournaledEvent, ...]:
    """Return all entries after a base's; raises the errors of `recover`."""
    entries: list[JournaledEvent] = []
    for expected, row in enumerate(connection.execute(_entries_after(run_id, base.seq)), start=base.seq + 1):
        if row.seq != expected:
            missing = f"run {run_id}: entry {expected} is missing before {row.seq}"
            raise StoreCorrupted("; ".join([*base.faults, missing]))
        entries.append(_read_entry(row))
    if base.faults and not base.seq and not entries:
        raise StoreCorrupted("; ".join([*base.faults, f"run {run_id}: no entry is left to replay instead"]))
    return tuple(entries)


def read_base(connection: Connection, run_id: RunId, *, most: int | None = None) -> Base[Ledger]:
    """Read the last good snapshot of a run of rounds; see `newest_base`."""
    return newest_base(connection, run_id, most, Ledger, _read_snapshot)


def newest_base(
    connection: Connection,
    run_id: RunId,
    most: int | None,
    empty: Callable[[], L],
    read: Callable[[Connection, Row[Any], str], L],
) -> Base[L]:
    """Read the last good snapshot of a run, within a transaction of the caller; without one the ledger is empty.

    Args:
        connection: the transaction's connection.
        run_id: the run.
        most: the newest entry that the snapshot may follow; None: any.
        empty: makes the ledger before the first entry.
        read: (connection, row, its name in errors) -> the ledger of a snapshot whose checksum is right.
    """
    faults: list[str] = []
    snapshots = select(SNAPSHOTS).where(SNAPSHOTS.c.run_id == run_id).order_by(SNAPSHOTS.c.seq.desc())
    if most is not None:
        snapshots = snapshots.where(SNAPSHOTS.c.seq <= most)
    for row in connection.execute(snapshots):
        where = f"run {run_id}, snapshot {row.seq}"
        try:
            if checksums.of_snapshot(row) != row.checksum:
                raise StoreCorrupted(f"{where}: its checksum is wrong")
            return Base(read(connection, row, where), row.seq, tuple(faults))
        except StoreCorrupted as error:
            faults.append(str(error))
    return Base(empty(), 0, tuple(faults))


def newest_snapshot(connection: Connection, run_id: RunId) -> tuple[Base[Ledger], float]:
    """Read the last good snapshot of a run of rounds with its time; see `newest_base`."""
    base = read_base(connection, run_id)
    of_it = (SNAPSHOTS.c.run_id == run_id, SNAPSHOTS.c.seq == base.seq)
    return base, connection.scalar(select(SNAPSHOTS.c.at).where(*of_it)) or 0.0


@dataclass(frozen=True, slots=True)
class BareBase(Base[Ledger]):
    """Base without its members, which the pages from `first` on have."""

    first: int = 0
    num_members: int = 0


def read_bare_base(connection: Connection, run_id: RunId) -> BareBase:
    """Read the last good snapshot of a run of rounds without its members; see `newest_base`."""

    def read(_: Connection, row: Row[Any], where: str) -> tuple[Ledger, int, int]:
        return decode_ledger(row.body, where=where), row.first, row.num_members

    base = newest_base(connection, run_id, None, lambda: (Ledger(), 0, 0), read)
    return BareBase(base.ledger[0], base.seq, base.faults, *base.ledger[1:])


def read_entries(connection: Connection, run_id: RunId, after: int, most: int) -> list[JournaledEvent]:
    """Read the first `most` entries after the entry `after`; the first one has a later number if some were deleted.

    Raises:
        StoreCorrupted: an entry is damaged or missing.
    """
    entries = [_read_entry(row) for row in connection.execute(_entries_after(run_id, after).limit(most))]
    for before, entry in pairwise(entries):
        if entry.seq != before.seq + 1:
            raise StoreCorrupted(f"run {run_id}: entry {before.seq + 1} is missing before {entry.seq}")
    return entries


def last_seq(connection: Connection, run_id: RunId) -> int:
    """Return the number of the last entry of a run; 0: there is none."""
    newest = (select(func.max(table.c.seq)).where(table.c.run_id == run_id) for table in (JOURNAL, SNAPSHOTS))
    return max(connection.scalar(query) or 0 for query in newest)


def _entries_after(run_id: RunId, seq: int) -> Select[Any]:
    return select(JOURNAL).where(JOURNAL.c.run_id == run_id, JOURNAL.c.seq > seq).order_by(JOURNAL.c.seq)


def _read_snapshot(connection: Connection, row: Row[Any], where: str) -> Ledger:
    ledger = decode_ledger(row.body, where=where)
    if row.num_members:
        membership = ledger.membership
        membership.read(_read_pages(connection, row, where), first=row.first)
        if len(membership.members) != row.num_members:
            raise StoreCorrupted(f"{where}: it has {len(membership.members)} of {count_of(row.num_members, 'member')}")
    return ledger


def _read_pages(connection: Connection, row: Row[Any], where: str) -> Iterator[tuple[int, dict[ClientId, Member]]]:
    of_snapshot = (MEMBERS.c.run_id == row.run_id, MEMBERS.c.seq.between(row.first, row.seq))
    pages = select(MEMBERS).where(*of_snapshot, MEMBERS.c.page != CONTENTS)
    for page in connection.execute(pages.order_by(MEMBERS.c.seq, MEMBERS.c.page)):
        place = f"{where}, page {page.page} of entry {page.seq}"
        if checksums.of_page(page) != page.checksum:
            raise StoreCorrupted(f"{place}: its checksum is wrong")
        yield page.seq, decode_page(page.body, where=place)


def _read_entry(row: Row[Any]) -> JournaledEvent:
    where = f"run {row.run_id}, entry {row.seq}"
    if checksums.of_entry(row.seq, row.at, row.kind, row.body) != row.checksum:
        raise StoreCorrupted(f"{where}: its checksum is wrong")
    return JournaledEvent(row.seq, row.at, decode_event(row.kind, row.body, where=where))
