"""The disk of a simulated coordinator, which survives a crash: batches in the encoding of the deployed journal."""

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field

from atoll.protocol.vocabulary import RoundId
from atoll.server.journal.codec import (
    decode_event,
    decode_ledger,
    decode_page,
    decode_record,
    encode_event,
    encode_ledger_without_members,
    encode_page,
    encode_record,
)
from atoll.server.rounds.events import Abandon, AmendRecord, Commit, Effect, Event
from atoll.server.rounds.ledger import Ledger
from atoll.server.rounds.record import RoundRecord
from atoll.server.rounds.run_machine import RunMachine
from atoll.server.rounds.run_rules import RunRules
from tests.histories.history import Step

Reply = Callable[[tuple[Effect, ...]], None]
WHERE = "the simulated disk"


@dataclass(slots=True)
class Posted:
    """An event that the machine has received and that is not yet on disk."""

    step: Step
    snapshot: "Snapshot | None"
    records: Mapping[RoundId, str]
    reply: Reply | None


@dataclass(frozen=True, slots=True)
class Snapshot:
    """The ledger after an entry, and the pages of the members that changed since the snapshot before."""

    seq: int
    body: str
    first: int
    num_members: int
    pages: tuple[str, ...]

    @classmethod
    def of(cls, machine: RunMachine, seq: int) -> "Snapshot":
        """Encode a snapshot of the machine's present state."""
        ledger, membership = machine.ledger, machine.ledger.membership
        written = membership.unwritten.take(membership.members, seq)
        pages = tuple(encode_page(membership.members, names) for names in written.pages.values())
        return cls(seq, encode_ledger_without_members(ledger), written.first, written.num_members, pages)


SNAPSHOTS_KEPT = 2
"""Number of snapshots that stay on disk, as after `Journal.prune`, with the entries since the older one."""


@dataclass(slots=True)
class Disk:
    """The journal, the last snapshots and the records."""

    entries: list[tuple[float, Event]] = field(default_factory=list)  # encoded on reading, because they never change
    snapshots: list[Snapshot] = field(default_factory=list)
    pages: list[tuple[int, str]] = field(default_factory=list)  # pages of members, with the entry of their snapshot
    records: dict[RoundId, str] = field(default_factory=dict)
    damaged: set[int] = field(default_factory=set)  # entries of the damaged snapshots

    @property
    def _good(self) -> list[Snapshot]:
        return [snapshot for snapshot in self.snapshots if snapshot.seq not in self.damaged]

    @property
    def newest(self) -> Snapshot | None:
        """The last undamaged snapshot; None: there is none, and the journal has all entries."""
        good = self._good
        assert good or len(self.snapshots) < SNAPSHOTS_KEPT, "no snapshot is left to replay from"
        return good[-1] if good else None

    def last_instant(self) -> float:
        """Return the latest time of an entry."""
        return max((at for at, _ in self.entries), default=0.0)

    def damage_newest(self) -> bool:
        """Damage the newest snapshot; return False if the journal could not be replayed without it."""
        good = self._good
        if not good or (len(good) == 1 and len(self.snapshots) == SNAPSHOTS_KEPT):
            return False
        self.damaged.add(good[-1].seq)
        return True

    def write(self, batch: Iterable[Posted]) -> None:
        """Write a batch atomically, as a group commit does."""
        for posted in batch:
            self.entries.append((posted.step.at, posted.step.event))
            if posted.snapshot is not None:
                self._add(posted.snapshot)
            self.records.update(posted.records)

    def _add(self, snapshot: Snapshot) -> None:
        self.snapshots = [*self.snapshots[1 - SNAPSHOTS_KEPT :], snapshot]
        self.pages += [(snapshot.seq, page) for page in snapshot.pages]
        needed = self.snapshots[0].first if len(self.snapshots) == SNAPSHOTS_KEPT else 0
        self.pages = [(seq, page) for seq, page in self.pages if seq >= needed]

    def ledger(self) -> tuple[int, Ledger]:
        """Return the number of entries before the newest good snapshot, and its ledger."""
        if (newest := self.newest) is None:
            return 0, Ledger()
        ledger = decode_ledger(newest.body, where=WHERE)
        pages = [(seq, decode_page(page, where=WHERE)) for seq, page in self.pages if newest.first <= seq <= newest.seq]
        ledger.membership.read(pages, first=newest.first)
        assert len(ledger.membership.members) == newest.num_members
        return newest.seq, ledger

    def rebuilt(self, rules: RunRules) -> tuple[RunMachine, int]:
        """Rebuild the machine from the newest good snapshot and the events since; return it and their first entry."""
        done, ledger = self.ledger()
        machine = RunMachine(rules, ledger)
        for at, event in self.entries[done:]:
            machine.receive(decode_event(*encode_event(event), where=WHERE), at)
        return machine, done

    def decoded_records(self) -> dict[RoundId, RoundRecord]:
        """Return the records of all rounds that have ended."""
        return {round_id: decode_record(body, where=WHERE) for round_id, body in self.records.items()}


def records_of(effects: Iterable[Effect], machine: RunMachine) -> dict[RoundId, str]:
    """Encode the records that an event has changed, at once, because the machine may forget them later."""
    changed = {e.round_id for e in effects if isinstance(e, Commit | Abandon | AmendRecord)}
    records = {round_id: machine.record_of(round_id) for round_id in changed}
    return {round_id: encode_record(record) for round_id, record in records.items() if record is not None}
