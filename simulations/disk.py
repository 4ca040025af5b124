"""What survives a crash of a simulated coordinator, written as it is deployed: by the codec, batch after batch."""

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field

from atoll.protocol.vocabulary import RoundId
from atoll.server.codec import decode_event, decode_ledger, decode_record, encode_event, encode_record
from atoll.server.events import Abandon, AmendRecord, Commit, Effect
from atoll.server.record import RoundRecord
from atoll.server.run import RunMachine, RunRules
from atoll.simulations.history import Step

Reply = Callable[[tuple[Effect, ...]], None]
WHERE = "the simulated disk"


@dataclass(frozen=True, slots=True)
class Posted:
    """An event that was decided and is not yet on disk."""

    step: Step
    ledger: str | None
    records: Mapping[RoundId, str]
    reply: Reply | None


@dataclass(slots=True)
class Disk:
    """The journal, the last snapshot and the records."""

    entries: list[tuple[float, str, str]] = field(default_factory=list)
    snapshot: tuple[int, str] | None = None  # the number of entries before it, and the ledger
    records: dict[RoundId, str] = field(default_factory=dict)

    @property
    def num_in_snapshot(self) -> int:
        """How many entries need no replay."""
        return self.snapshot[0] if self.snapshot else 0

    def write(self, batch: Iterable[Posted]) -> None:
        """One group commit: all of it or nothing."""
        for posted in batch:
            self.entries.append((posted.step.at, *encode_event(posted.step.event)))
            if posted.ledger is not None:
                self.snapshot = (len(self.entries), posted.ledger)
            self.records.update(posted.records)

    def rebuilt(self, rules: RunRules) -> RunMachine:
        """The machine as the next process has it: the last snapshot, and every event since."""
        machine = RunMachine(rules, decode_ledger(self.snapshot[1], where=WHERE) if self.snapshot else None)
        for at, kind, body in self.entries[self.num_in_snapshot :]:
            machine.receive(decode_event(kind, body, where=WHERE), at)
        return machine

    def decoded_records(self) -> dict[RoundId, RoundRecord]:
        """The record of every round that has ended."""
        return {round_id: decode_record(body, where=WHERE) for round_id, body in self.records.items()}


def records_of(effects: Iterable[Effect], machine: RunMachine) -> dict[RoundId, str]:
    """The records that an event has changed, as it left them: a later event may make the machine forget them."""
    written = {e.round_id for e in effects if isinstance(e, Commit | Abandon | AmendRecord)}
    found = {round_id: machine.record_of(round_id) for round_id in written}
    return {round_id: encode_record(record) for round_id, record in found.items() if record is not None}
