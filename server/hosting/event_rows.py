"""The rows that must be on disk before an event's effects are carried out: a function of event and resulting state."""

from collections.abc import Callable
from dataclasses import dataclass

from atoll.protocol.disclosure import MetricsLeave
from atoll.protocol.vocabulary import Digest, RoundId, RunId, Version
from atoll.server.exchanges import events as exchanges
from atoll.server.exchanges.ledger import Ledger as LedgerOfMessages
from atoll.server.files.run_store import KeptUpdate
from atoll.server.journal.codec import encode_event, encode_ledger_without_members, encode_record
from atoll.server.journal.member_rows import pages_of
from atoll.server.journal.rows import Batch, Entry, EvaluationRow, RecordRow, RunChange, Snapshot, UpdateRow, VersionRow
from atoll.server.journal.sources import IN_SUMS, SITE, TRAINING
from atoll.server.rounds.client_evaluation import IN_SUMS_ALONE, shown_alone, shown_sum
from atoll.server.rounds.events import (
    Abandon,
    Accept,
    Aggregated,
    AmendRecord,
    CloseEvaluation,
    Commit,
    EndRun,
    Event,
    ModelEvaluated,
    PauseRun,
    ResumeRequested,
    RunStarted,
    Sums,
    UpdateReceived,
)
from atoll.server.rounds.ledger import Ledger
from atoll.server.rounds.run_machine import RunMachine
from atoll.task.metrics import only_finite


@dataclass(frozen=True, slots=True)
class Decided:
    """Event that the machine has just decided."""

    run_id: RunId
    seq: int
    at: float
    event: Event | exchanges.Event
    effects: tuple[object, ...]


def add_rows(
    batch: Batch, decided: Decided, machine: RunMachine, kept: KeptUpdate | None, *, num_bytes: Callable[[Version], int]
) -> None:
    """Add all rows that follow from an event, encoded before the state changes again.

    Args:
        batch: the rows of the next group commit.
        decided: the event and its effects.
        machine: the machine after the event.
        kept: the durable update that the event received, if any.
        num_bytes: returns the size of a version's file [bytes].
    """
    add_rows_of_any(batch, decided, machine.ledger, kept)
    rows = _Rows(batch, decided, machine, num_bytes)
    rows.add_of_event()
    for effect in decided.effects:
        match effect:
            case Commit(round_id, version, model_digest):
                rows.add_version(version, model_digest)
                rows.add_record(round_id)
                rows.add_training_in_sums(round_id)
                rows.add_snapshot()
            case Abandon(round_id):
                rows.add_record(round_id)
                rows.add_snapshot()
            case AmendRecord(round_id):
                rows.add_record(round_id)
            case CloseEvaluation():
                rows.add_clients_evaluation(effect)
            case PauseRun() | EndRun():
                rows.add_snapshot()
            case Accept():
                rows.add_training()
            case _:
                pass


def add_rows_of_any(batch: Batch, decided: Decided, ledger: Ledger | LedgerOfMessages, kept: KeptUpdate | None) -> None:
    """Add the rows that an event of any run has: its entry, an accepted update, a change of the run's state.

    Args:
        batch: the rows of the next group commit.
        decided: the event and its effects.
        ledger: the state of the run after the event.
        kept: the durable update that the event received, if any.
    """
    run_id, event, effects = decided.run_id, decided.event, decided.effects
    batch.entries.append(Entry(run_id, decided.seq, decided.at, *encode_event(event)))
    accepted = [effect.digest for effect in effects if isinstance(effect, Accept)] if kept is not None else []
    batch.updates += [UpdateRow(run_id, digest, kept.meta, kept.data) for digest in accepted if kept is not None]
    is_over = any(isinstance(effect, EndRun) for effect in effects)
    if is_over or isinstance(event, RunStarted | ResumeRequested) or any(isinstance(one, PauseRun) for one in effects):
        batch.changes.append(RunChange(run_id, ledger.state, ledger.cause, decided.at if is_over else None))


class _Rows:
    """Rows that one event adds to a batch."""

    def __init__(
        self, batch: Batch, decided: Decided, machine: RunMachine, num_bytes: Callable[[Version], int]
    ) -> None:
        self.batch = batch
        self._decided, self._machine, self._num_bytes = decided, machine, num_bytes
        self._has_snapshot = False

    def add_of_event(self) -> None:
        match self._decided.event:
            case RunStarted(model_digest):
                self.add_version(self._machine.ledger.version, model_digest)
            case ModelEvaluated(version, statistics, detail):
                run_id, at = self._decided.run_id, self._decided.at
                self.batch.evaluations.append(EvaluationRow(run_id, version, "server", statistics, 1, detail, at))
            case _:
                pass

    def add_version(self, version: Version, digest: Digest) -> None:
        row = VersionRow(self._decided.run_id, version, digest, self._num_bytes(version), self._decided.at)
        self.batch.versions.append(row)

    def add_record(self, round_id: RoundId) -> None:
        if (record := self._machine.record_of(round_id)) is not None:
            self.batch.records.append(RecordRow(self._decided.run_id, encode_record(record), record))

    def add_snapshot(self) -> None:
        if not self._machine.may_snapshot or self._has_snapshot:
            return
        self._has_snapshot = True
        if self._machine.rules.secure is not None:
            self.batch.forgotten.append((self._decided.run_id, self._decided.seq))
        run_id, seq, ledger = self._decided.run_id, self._decided.seq, self._machine.ledger
        written = ledger.membership.unwritten.take(ledger.membership.members, seq)
        self.batch.members += pages_of(run_id, seq, written, ledger.membership.members)
        body = encode_ledger_without_members(ledger)
        self.batch.snapshots.append(Snapshot(run_id, seq, self._decided.at, body, written.first, written.num_members))

    def add_clients_evaluation(self, effect: CloseEvaluation) -> None:
        if self._machine.rules.secure is not None:
            self.batch.forgotten.append((self._decided.run_id, self._decided.seq))
        found, too_few = shown_sum(effect)
        left_out = [*effect.refused.items(), *effect.failures.items(), *found.said]
        each = (f"{client}: {why}" for client, why in sorted(left_out))
        detail = "; ".join(filter(None, (too_few, *each)))
        run_id, at = self._decided.run_id, self._decided.at
        row = EvaluationRow(run_id, effect.version, "clients", found.sums, found.num_clients, detail, at)
        self.batch.evaluations.append(row)
        if self._machine.rules.keep_sites:
            answers, reasons = shown_alone(effect)
            self.batch.evaluations += (
                self._of_site(f"{SITE}{client}", effect.version, answers.get(client), reasons.get(client, ""))
                for client in sorted({*answers, *reasons})
            )

    def add_training(self) -> None:
        """Add the metrics of an accepted update's training, or the reason why there are none."""
        event = self._decided.event
        if not (isinstance(event, UpdateReceived) and event.update.statistics and self._machine.rules.keep_sites):
            return
        update = event.update
        is_shown = update.disclosure.metrics is MetricsLeave.PER_SITE
        sums, why = (only_finite(update.statistics), "") if is_shown else (None, IN_SUMS_ALONE)
        row = self._of_site(f"{TRAINING}{update.client_id}", update.base_version, sums, why)
        self.batch.evaluations.append(row)

    def add_training_in_sums(self, round_id: RoundId) -> None:
        """Add the metrics of the training that the secure sums of a committed round have added up."""
        event, record = self._decided.event, self._machine.record_of(round_id)
        if not isinstance(event, Aggregated) or not event.statistics or record is None:
            return
        members = sum(client.used_in == round_id for client in record.clients.values())
        run_id, at = self._decided.run_id, self._decided.at
        sums = only_finite(event.statistics)
        self.batch.evaluations.append(EvaluationRow(run_id, record.base_version, IN_SUMS, sums, members, "", at))

    def _of_site(self, source: str, version: Version, sums: Sums | None, detail: str) -> EvaluationRow:
        is_shown = sums is not None
        return EvaluationRow(self._decided.run_id, version, source, sums, int(is_shown), detail, self._decided.at)
