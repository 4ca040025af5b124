"""The recovery of a run from the journal: its last good snapshot and the entries since, by their checksums."""

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

from sqlalchemy import Connection, Row, select

from atoll.aggregation.printable import count_of
from atoll.protocol.vocabulary import ClientId, RunId
from atoll.server.errors import StoreCorrupted
from atoll.server.journal import checksums
from atoll.server.journal.codec import decode_event, decode_ledger, decode_page
from atoll.server.journal.schema import JOURNAL, MEMBERS, SNAPSHOTS
from atoll.server.rounds.events import Event
from atoll.server.rounds.ledger import Ledger
from atoll.server.rounds.member import Member
from atoll.server.rounds.run_machine import RunMachine
from atoll.server.rounds.run_rules import RunRules


@dataclass(frozen=True, slots=True)
class JournaledEvent:
    """An event with its time [s since the epoch] and its number in the run."""

    seq: int
    at: float
    event: Event


@dataclass(frozen=True, slots=True)
class Recovered:
    """The last good snapshot of a run (an empty ledger: there is none) and all events since."""

    ledger: Ledger
    snapshot_seq: int
    entries: tuple[JournaledEvent, ...]
    faults: tuple[str, ...] = ()  # of newer snapshots that are damaged, for the operator

    @property
    def seq(self) -> int:
        """The number of the last entry; the next entry has one more."""
        return self.entries[-1].seq if self.entries else self.snapshot_seq

    def replay(self, rules: RunRules) -> RunMachine:
        """Return the machine after the last entry. Call it once: the machine takes the ledger and changes it."""
        machine = RunMachine(rules, self.ledger)
        for entry in self.entries:
            machine.receive(entry.event, entry.at)
        return machine


def recover(connection: Connection, run_id: RunId) -> Recovered:
    """Read the last good snapshot of a run and the entries since, within a transaction of the caller.

    Raises:
        StoreCorrupted: an entry that is needed is missing or damaged.
    """
    faults: list[str] = []
    ledger, seq = Ledger(), 0
    snapshots = select(SNAPSHOTS).where(SNAPSHOTS.c.run_id == run_id).order_by(SNAPSHOTS.c.seq.desc())
    for row in connection.execute(snapshots):
        try:
            ledger, seq = _read_snapshot(connection, row), row.seq
            break
        except StoreCorrupted as error:
            faults.append(str(error))
    later = select(JOURNAL).where(JOURNAL.c.run_id == run_id, JOURNAL.c.seq > seq).order_by(JOURNAL.c.seq)
    entries: list[JournaledEvent] = []
    for expected, row in enumerate(connection.execute(later), start=seq + 1):
        if row.seq != expected:
            raise StoreCorrupted("; ".join([*faults, f"run {run_id}: entry {expected} is missing before {row.seq}"]))
        entries.append(_read_entry(row))
    if faults and not seq and not entries:
        raise StoreCorrupted("; ".join([*faults, f"run {run_id}: no entry is left to replay instead"]))
    return Recovered(ledger, seq, tuple(entries), tuple(faults))


def _read_snapshot(connection: Connection, row: Row[Any]) -> Ledger:
    where = f"run {row.run_id}, snapshot {row.seq}"
    if checksums.of_snapshot(row) != row.checksum:
        raise StoreCorrupted(f"{where}: its checksum is wrong")
    ledger = decode_ledger(row.body, where=where)
    if row.num_members:
        membership = ledger.membership
        membership.read(_read_pages(connection, row, where), first=row.first)
        if len(membership.members) != row.num_members:
            raise StoreCorrupted(f"{where}: it has {len(membership.members)} of {count_of(row.num_members, 'member')}")
    return ledger


def _read_pages(connection: Connection, row: Row[Any], where: str) -> Iterator[tuple[int, dict[ClientId, Member]]]:
    of_snapshot = (MEMBERS.c.run_id == row.run_id, MEMBERS.c.seq.between(row.first, row.seq))
    for page in connection.execute(select(MEMBERS).where(*of_snapshot).order_by(MEMBERS.c.seq, MEMBERS.c.page)):
        place = f"{where}, page {page.page} of entry {page.seq}"
        if checksums.of_page(page) != page.checksum:
            raise StoreCorrupted(f"{place}: its checksum is wrong")
        yield page.seq, decode_page(page.body, where=place)


def _read_entry(row: Row[Any]) -> JournaledEvent:
    where = f"run {row.run_id}, entry {row.seq}"
    if checksums.of_entry(row.seq, row.at, row.kind, row.body) != row.checksum:
        raise StoreCorrupted(f"{where}: its checksum is wrong")
    return JournaledEvent(row.seq, row.at, decode_event(row.kind, row.body, where=where))
