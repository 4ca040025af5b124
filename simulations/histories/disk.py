"""What survives a crash of a simulated coordinator, written as it is deployed: by the codec, batch after batch."""

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
from atoll.server.rounds.update_intake import RunRules
from atoll.simulations.histories.history import Step

Reply = Callable[[tuple[Effect, ...]], None]
WHERE = "the simulated disk"


@dataclass(slots=True)
class Posted:
    """An event that was decided and is not yet on disk."""

    step: Step
    snapshot: "Snapshot | None"
    records: Mapping[RoundId, str]
    reply: Reply | None


@dataclass(frozen=True, slots=True)
class Snapshot:
    """The ledger as an entry left it, and the pages of the members that had changed."""

    seq: int
    body: str
    first: int
    num_members: int
    pages: tuple[str, ...]

    @classmethod
    def of(cls, machine: RunMachine, seq: int) -> "Snapshot":
        """Encoded while it is true."""
        ledger, membership = machine.ledger, machine.ledger.membership
        written = membership.unwritten.take(membership.members, seq)
        pages = tuple(encode_page(membership.members, names) for names in written.pages)
        return cls(seq, encode_ledger_without_members(ledger), written.first, written.num_members, pages)


SNAPSHOTS_KEPT = 2
"""As `Journal.prune` keeps them, and the entries since the older one."""


@dataclass(slots=True)
class Disk:
    """The journal, the last snapshots and the records."""

    entries: list[tuple[float, Event]] = field(default_factory=list)  # encoded when they are read: they never change
    snapshots: list[Snapshot] = field(default_factory=list)
    pages: list[tuple[int, str]] = field(default_factory=list)  # of members, by the entry of their snapshot
    records: dict[RoundId, str] = field(default_factory=dict)
    damaged: set[int] = field(default_factory=set)  # snapshots, by their entries

    @property
    def _good(self) -> list[Snapshot]:
        return [snapshot for snapshot in self.snapshots if snapshot.seq not in self.damaged]

    @property
    def newest(self) -> Snapshot | None:
        """The last snapshot that can be read; none: every entry is there since the first."""
        good = self._good
        assert good or len(self.snapshots) < SNAPSHOTS_KEPT, "no snapshot is left to replay from"
        return good[-1] if good else None

    def last_instant(self) -> float:
        """The latest time that any entry holds."""
        return max((at for at, _ in self.entries), default=0.0)

    def damage_newest(self) -> bool:
        """Its checksum will be wrong. Not the last one from which everything can be replayed: False."""
        good = self._good
        if not good or (len(good) == 1 and len(self.snapshots) == SNAPSHOTS_KEPT):
            return False
        self.damaged.add(good[-1].seq)
        return True

    def write(self, batch: Iterable[Posted]) -> None:
        """One group commit: all of it or nothing."""
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
        """As the newest good snapshot has it, and after how many entries that was."""
        if (newest := self.newest) is None:
            return 0, Ledger()
        ledger = decode_ledger(newest.body, where=WHERE)
        pages = [(seq, decode_page(page, where=WHERE)) for seq, page in self.pages if newest.first <= seq <= newest.seq]
        ledger.membership.read(pages, first=newest.first)
        assert len(ledger.membership.members) == newest.num_members
        return newest.seq, ledger

    def rebuilt(self, rules: RunRules) -> tuple[RunMachine, int]:
        """The machine as the next process has it: the last good snapshot (of so many entries), every event since."""
        done, ledger = self.ledger()
        machine = RunMachine(rules, ledger)
        for at, event in self.entries[done:]:
            machine.receive(decode_event(*encode_event(event), where=WHERE), at)
        return machine, done

    def decoded_records(self) -> dict[RoundId, RoundRecord]:
        """The record of every round that has ended."""
        return {round_id: decode_record(body, where=WHERE) for round_id, body in self.records.items()}


def records_of(effects: Iterable[Effect], machine: RunMachine) -> dict[RoundId, str]:
    """The records that an event has changed, as it left them: a later event may make the machine forget them."""
    written = {e.round_id for e in effects if isinstance(e, Commit | Abandon | AmendRecord)}
    found = {round_id: machine.record_of(round_id) for round_id in written}
    return {round_id: encode_record(record) for round_id, record in found.items() if record is not None}
