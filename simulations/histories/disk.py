"""What survives a crash of a simulated coordinator, written as it is deployed: by the codec, batch after batch."""

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field

from atoll.protocol.vocabulary import RoundId
from atoll.server.codec import decode_event, decode_ledger, decode_record, encode_event, encode_record
from atoll.server.events import Abandon, AmendRecord, Commit, Effect
from atoll.server.record import RoundRecord
from atoll.server.run import RunMachine, RunRules
from atoll.simulations.histories.history import Step

Reply = Callable[[tuple[Effect, ...]], None]
WHERE = "the simulated disk"


@dataclass(frozen=True, slots=True)
class Posted:
    """An event that was decided and is not yet on disk."""

    step: Step
    ledger: str | None
    records: Mapping[RoundId, str]
    reply: Reply | None


SNAPSHOTS_KEPT = 2
"""As `Journal.prune` keeps them, and the entries since the older one."""


@dataclass(slots=True)
class Disk:
    """The journal, the last snapshots and the records."""

    entries: list[tuple[float, str, str]] = field(default_factory=list)
    snapshots: list[tuple[int, str]] = field(default_factory=list)  # the number of entries before it, and the ledger
    records: dict[RoundId, str] = field(default_factory=dict)
    damaged: set[int] = field(default_factory=set)  # snapshots, by their numbers of entries

    @property
    def _good(self) -> list[tuple[int, str]]:
        return [snapshot for snapshot in self.snapshots if snapshot[0] not in self.damaged]

    @property
    def newest(self) -> tuple[int, str] | None:
        """The last snapshot that can be read; none: every entry is there since the first."""
        good = self._good
        assert good or len(self.snapshots) < SNAPSHOTS_KEPT, "no snapshot is left to replay from"
        return good[-1] if good else None

    def last_instant(self) -> float:
        """The latest time that any entry holds."""
        return max((at for at, _, _ in self.entries), default=0.0)

    def damage_newest(self) -> bool:
        """Its checksum will be wrong. Not the last one from which everything can be replayed: False."""
        good = self._good
        if not good or (len(good) == 1 and len(self.snapshots) == SNAPSHOTS_KEPT):
            return False
        self.damaged.add(good[-1][0])
        return True

    def write(self, batch: Iterable[Posted]) -> None:
        """One group commit: all of it or nothing."""
        for posted in batch:
            self.entries.append((posted.step.at, *encode_event(posted.step.event)))
            if posted.ledger is not None:
                self.snapshots = [*self.snapshots[1 - SNAPSHOTS_KEPT :], (len(self.entries), posted.ledger)]
            self.records.update(posted.records)

    def rebuilt(self, rules: RunRules) -> tuple[RunMachine, int]:
        """The machine as the next process has it: the last good snapshot (of so many entries), every event since."""
        done, ledger = self.newest or (0, None)
        machine = RunMachine(rules, None if ledger is None else decode_ledger(ledger, where=WHERE))
        for at, kind, body in self.entries[done:]:
            machine.receive(decode_event(kind, body, where=WHERE), at)
        return machine, done

    def decoded_records(self) -> dict[RoundId, RoundRecord]:
        """The record of every round that has ended."""
        return {round_id: decode_record(body, where=WHERE) for round_id, body in self.records.items()}


def records_of(effects: Iterable[Effect], machine: RunMachine) -> dict[RoundId, str]:
    """The records that an event has changed, as it left them: a later event may make the machine forget them."""
    written = {e.round_id for e in effects if isinstance(e, Commit | Abandon | AmendRecord)}
    found = {round_id: machine.record_of(round_id) for round_id in written}
    return {round_id: encode_record(record) for round_id, record in found.items() if record is not None}
