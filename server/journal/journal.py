"""The journal, a write-ahead log: every event of every run is durable before its effects are carried out.

Beside the events the journal stores snapshots, the records of rounds, and the updates. A group commit is atomic: if
`commit` returns, its whole batch is on disk; if it raises, nothing of the batch is, and the same batch may be committed
again. The caller encodes the values when it fills a batch, so that a commit may run on a thread while the machines
continue. Entries, snapshots and pages carry checksums; a damaged row is never replayed.
"""

import json
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import InitVar, dataclass, field, fields, replace
from functools import cache
from operator import attrgetter
from typing import Any, Self, TypeVar

from sqlalchemy import Connection, Row, delete, func, select, update

from atoll.plugins.kind import AS_RECORDED
from atoll.protocol.vocabulary import Digest, Phase, RoundId, RunId, RunState, Version
from atoll.server.config.run import RunConfig
from atoll.server.errors import StoreCorrupted
from atoll.server.exchanges.exchange import Exchange
from atoll.server.exchanges.ledger import Ledger as LedgerOfMessages
from atoll.server.journal import checksums
from atoll.server.journal.codec import as_of_then, decode_rules, encode, encode_rules
from atoll.server.journal.exchanges import read_exchanges, recover_exchanges
from atoll.server.journal.pruning import Stay, prune
from atoll.server.journal.recovery import Recovered, RecoveredRounds, recover
from atoll.server.journal.reveals import forget_reveals
from atoll.server.journal.schema import EVALUATIONS, JOURNAL, MEMBERS, META, ROUNDS, RUNS, SNAPSHOTS, UPDATES, VERSIONS
from atoll.server.journal.state_directory import StateDirectory
from atoll.server.journal.statements import SELECT_UPDATES, statements
from atoll.server.rounds.events import Sums
from atoll.server.rounds.record import RoundRecord
from atoll.server.rounds.run_rules import RunRules

T = TypeVar("T")

UPDATES_AT_ONCE = 500
"""Largest number of updates in one query."""

_DELETED = "deleted run "
"""Prefix of a key of the table `meta`, followed by the id of a deleted run."""

_FIRST = "first settings of run "
_CHANGED = "changed settings of run "
"""Prefix of a key of the table `meta`, followed by the id of a run whose settings a resume has changed."""

# ---------------------------------------------------------------- rows


@dataclass(frozen=True, slots=True)
class RunRow:
    """Row of a run: its settings, its place in the queue, its state."""

    run_id: RunId
    config: RunConfig
    rules: RunRules
    created_at: float
    order: int = 0  # place in the queue: `add_run` assigns the last one
    state: RunState = RunState.QUEUED
    cause: str = ""
    ended_at: float | None = None

    @classmethod
    def new(cls, run_id: RunId, config: RunConfig, rules: RunRules, now: float) -> Self:
        """Return the row of a run that waits in the queue."""
        return cls(run_id, config, rules, now)

    @property
    def name(self) -> str:
        """The operator's name of the run; several runs may share a name."""
        return self.config.name


@dataclass(frozen=True, slots=True)
class RunChange:
    """Change of a run's state: started, paused, resumed or ended."""

    run_id: RunId
    state: RunState
    cause: str = ""
    ended_at: float | None = None


@dataclass(frozen=True, slots=True)
class SettingsChange:
    """Settings of a run from a resume on; its earlier rules stay in its row, for a replay."""

    run_id: RunId
    config: RunConfig
    seq: int
    """The number of the resume's entry."""
    at: float
    """The time of the resume [s since the epoch]."""
    round_id: RoundId
    """The first round with the changed settings."""


@dataclass(frozen=True, slots=True)
class Entry:
    """Event of a run: `seq` is 1, 2, 3, ... within its run; kind and body from `encode_event`."""

    run_id: RunId
    seq: int
    at: float
    kind: str
    body: str


@dataclass(frozen=True, slots=True)
class Snapshot:
    """Ledger after the entry `seq`, from `encode_ledger_without_members` or (num_members = 0) `encode_ledger`."""

    run_id: RunId
    seq: int
    at: float
    body: str
    first: int = 0  # the entry of the first page of members to read
    num_members: int = 0


@dataclass(frozen=True, slots=True)
class Page:
    """Page of the members that had changed when the snapshot `seq` was taken, from `encode_page`."""

    run_id: RunId
    seq: int
    page: int
    body: str


@dataclass(frozen=True, slots=True)
class RecordRow:
    """Record of a round, from `encode_record`; a later row of the same round replaces it."""

    run_id: RunId
    record: str
    of: InitVar[RoundRecord]
    round_id: RoundId = field(init=False)
    phase: Phase = field(init=False)
    version: Version | None = field(init=False)

    def __post_init__(self, of: RoundRecord) -> None:
        for name in ("round_id", "phase", "version"):
            object.__setattr__(self, name, getattr(of, name))


@dataclass(frozen=True, slots=True)
class ExchangeRow:
    """Record of a closed exchange, the counterpart of a round's."""

    run_id: RunId
    round_id: int
    record: str
    phase: str
    version: None = None

    @classmethod
    def of(cls, run_id: RunId, exchange: Exchange) -> Self:
        """Return the row of an exchange."""
        return cls(run_id, exchange.number, encode(exchange), str(exchange.close_reason))


@dataclass(frozen=True, slots=True)
class VersionRow:
    """Version whose file is durable; `digest` is the digest of its manifest."""

    run_id: RunId
    version: Version
    digest: Digest
    num_bytes: int
    created_at: float


@dataclass(frozen=True, slots=True)
class EvaluationRow:
    """Evaluation of a version (`sources` has its kinds); without statistics `detail` has the reason.

    `values`: the task's metrics, computed from the sums; None where a metric is undefined.
    """

    run_id: RunId
    version: Version
    source: str
    statistics: Sums | None
    num_clients: int
    detail: str
    at: float
    values: Mapping[str, float | None] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class UpdateRow:
    """Metadata of an accepted update, from `encode_meta`, and its bytes if it has no file."""

    run_id: RunId
    digest: Digest
    meta: str
    data: bytes | None


@dataclass(slots=True)
class Batch:
    """Rows of one group commit."""

    entries: list[Entry] = field(default_factory=list)
    updates: list[UpdateRow] = field(default_factory=list)
    snapshots: list[Snapshot] = field(default_factory=list)
    members: list[Page] = field(default_factory=list)
    records: list[RecordRow | ExchangeRow] = field(default_factory=list)
    versions: list[VersionRow] = field(default_factory=list)
    evaluations: list[EvaluationRow] = field(default_factory=list)
    runs: list[RunRow] = field(default_factory=list)  # new, or with new settings
    changes: list[RunChange] = field(default_factory=list)  # in the order of the events
    settings: list[SettingsChange] = field(default_factory=list)
    forgotten: list[tuple[RunId, int]] = field(default_factory=list)  # runs whose reveals up to an entry are deleted


class Journal:
    """Journal of a coordinator, for writing and reading; one thread at a time."""

    def __init__(self, state: StateDirectory) -> None:
        self._database = state.database
        self._statements = statements(state.database.dialect)

    def add_run(self, row: RunRow) -> None:
        """Add a new run at the end of the queue; raises the errors of `commit`."""

        def add(connection: Connection) -> None:
            last = connection.scalar(select(func.max(RUNS.c.order))) or 0
            connection.execute(RUNS.insert(), _run_values(replace(row, order=last + 1)))

        self._database.write(add)

    def runs(self) -> list[RunRow]:
        """Return every run, in the order of the queue."""
        return self._database.read(run_rows)

    def first_settings(self, run_id: RunId) -> RunConfig | None:
        """Return the settings with which a run began, if a resume has changed them since."""
        key = f"{_FIRST}{run_id}"
        text = self._database.read(lambda connection: connection.scalar(select(META.c.value).where(META.c.key == key)))
        return None if text is None else _config(text)

    def read(self, work: Callable[[Connection], T]) -> T:
        """Return the result of a read-only `work` in one transaction; raises the errors of `commit`."""
        return self._database.read(work)

    def next_number(self, name: str) -> int:
        """Return the number for the next run of this name, whose id no run has ever had, not even a deleted one."""
        ids = self._database.read(
            lambda connection: [*connection.scalars(select(RUNS.c.run_id)), *_deleted(connection)]
        )
        tails = (run_id.removeprefix(f"{name}-") for run_id in ids if run_id.startswith(f"{name}-"))
        return 1 + max((int(tail) for tail in tails if tail.isdecimal()), default=0)

    def delete_run(self, run_id: RunId) -> None:
        """Delete everything of a run except its id; raises the errors of `commit`."""

        def drop(connection: Connection) -> None:
            for table in (RUNS, JOURNAL, SNAPSHOTS, MEMBERS, ROUNDS, VERSIONS, UPDATES, EVALUATIONS):
                connection.execute(delete(table).where(table.c.run_id == run_id))
            connection.execute(delete(META).where(META.c.key == f"{_FIRST}{run_id}"))
            connection.execute(delete(META).where(META.c.key.startswith(f"{_CHANGED}{run_id} ", autoescape=True)))
            connection.execute(META.insert().values(key=f"{_DELETED}{run_id}", value=""))

        self._database.write(drop)

    def deleted_runs(self) -> list[RunId]:
        """Return the ids of deleted runs, whose files may still exist."""
        return self._database.read(_deleted)

    def last_instant(self) -> float:
        """Return the latest time of all entries and snapshots [s since the epoch]; 0: there are none."""
        return self._database.read(
            lambda connection: max(
                connection.scalar(select(func.max(table.c.at))) or 0.0 for table in (JOURNAL, SNAPSHOTS)
            )
        )

    def commit(self, batch: Batch) -> None:
        """Write a batch in one transaction; it is durable when the call returns.

        Raises:
            DiskFull: nothing was written; try again when the disk has room.
        """
        self._database.write(lambda connection: self._write(connection, batch))
        if batch.forgotten:
            self._database.shed()

    def _write(self, connection: Connection, batch: Batch) -> None:
        sql = self._statements
        for statement, rows in (
            (sql.upsert_run, [_run_values(row) for row in batch.runs]),
            (sql.insert_update, [_values(row) for row in batch.updates]),
            (sql.upsert_snapshot, [_checked(row) for row in batch.snapshots]),
            (sql.upsert_page, [_checked(row) for row in batch.members]),
            (sql.upsert_round, [_values(row) for row in batch.records]),
            (sql.upsert_version, [_values(row) for row in batch.versions]),
            (sql.upsert_evaluation, [_values(row) for row in batch.evaluations]),
        ):
            if rows:
                connection.execute(statement, rows)
        if batch.entries:
            connection.exec_driver_sql(sql.insert_entry, [_entry_values(row) for row in batch.entries])
        for change in batch.changes:
            connection.execute(update(RUNS).where(RUNS.c.run_id == change.run_id).values(_values(change)))
        for new in batch.settings:
            _change_settings(connection, new)
        if batch.forgotten:
            with self._database.overwrite(connection):
                for run_id, seq in batch.forgotten:
                    forget_reveals(connection, run_id, seq)

    def load(self, run_id: RunId) -> RecoveredRounds:
        """Return the last good snapshot and the entries since.

        Raises:
            StoreCorrupted: a needed entry is missing or damaged.
        """
        return self._database.read(lambda connection: recover(connection, run_id))

    def load_exchanges(self, run_id: RunId) -> Recovered[LedgerOfMessages]:
        """Load a run of messages as `load` loads a run of rounds."""
        return self._database.read(lambda connection: recover_exchanges(connection, run_id))

    def exchanges(
        self, run_id: RunId, numbers: Collection[int] | None = None, *, after: int = 0
    ) -> dict[int, Exchange]:
        """Read closed exchanges; see `exchanges.read_exchanges`. Raises StoreCorrupted."""
        return self._database.read(lambda connection: read_exchanges(connection, run_id, numbers, after=after))

    def updates(self, run_id: RunId, digests: Sequence[Digest]) -> dict[Digest, UpdateRow]:
        """Return accepted updates of a run by digest.

        Raises:
            StoreCorrupted: an update is missing.
        """

        def find(connection: Connection) -> dict[Digest, UpdateRow]:
            found: dict[Digest, UpdateRow] = {}
            for begin in range(0, len(digests), UPDATES_AT_ONCE):
                some = {"run_id": run_id, "digests": digests[begin : begin + UPDATES_AT_ONCE]}
                found.update({row.digest: UpdateRow(*row) for row in connection.execute(SELECT_UPDATES, some)})
            return found

        found = self._database.read(find)
        if missing := sorted(set(digests) - set(found)):
            raise StoreCorrupted(f"run {run_id}: the journal has no updates {', '.join(missing[:5])}")
        return found

    def has_update(self, run_id: RunId, digest: Digest) -> bool:
        """Return whether an update was accepted, and is not deleted."""
        some = {"run_id": run_id, "digests": [digest]}
        return self._database.read(lambda connection: connection.execute(SELECT_UPDATES, some).first() is not None)

    def evaluations(self, run_id: RunId) -> list[EvaluationRow]:
        """Return all kept evaluations of a run, in the order of their versions."""
        found = select(EVALUATIONS).where(EVALUATIONS.c.run_id == run_id).order_by(EVALUATIONS.c.version)
        return self._database.read(lambda connection: [evaluation_of(row) for row in connection.execute(found)])

    def close(self) -> None:
        """Close the database; all commits are on disk already."""
        self._database.close()

    def prune(self, run_id: RunId, stay: Stay) -> None:
        """Delete the rows of a run that need not be kept; raises the errors of `commit`."""
        self._database.write(lambda connection: prune(connection, run_id, stay))


def _change_settings(connection: Connection, new: SettingsChange) -> None:
    """Replace the settings of a run; keep its first ones and each change."""
    of_run, first = RUNS.c.run_id == new.run_id, f"{_FIRST}{new.run_id}"
    if connection.scalar(select(META.c.value).where(META.c.key == first)) is None:
        before = connection.scalar(select(RUNS.c.config).where(of_run))
        connection.execute(META.insert().values(key=first, value=before))
    config = new.config.model_dump_json()
    connection.execute(update(RUNS).where(of_run).values(config=config))
    change = {"at": new.at, "round": new.round_id, "config": config}
    key = f"{_CHANGED}{new.run_id} {new.seq:015d}"
    connection.execute(META.insert().values(key=key, value=json.dumps(change)))


def settings_of(connection: Connection, run_id: RunId) -> list[SettingsChange]:
    """Return the first settings of a run, as a change before round 1, and each change since, in their order.

    Empty if no resume has changed them.
    """
    first = connection.scalar(select(META.c.value).where(META.c.key == f"{_FIRST}{run_id}"))
    if first is None:
        return []
    begin = f"{_CHANGED}{run_id} "
    rows = connection.execute(select(META).where(META.c.key.startswith(begin, autoescape=True)).order_by(META.c.key))
    return [
        SettingsChange(run_id, _config(first), 0, 0.0, RoundId(1)),
        *(_settings_change(run_id, int(row.key.removeprefix(begin)), json.loads(row.value)) for row in rows),
    ]


def _settings_change(run_id: RunId, seq: int, fields: dict[str, Any]) -> SettingsChange:
    return SettingsChange(run_id, _config(fields["config"]), seq, fields["at"], RoundId(fields["round"]))


def _config(text: str) -> RunConfig:
    return RunConfig.model_validate_json(as_of_then(text, "round"), context=AS_RECORDED)


def _deleted(connection: Connection) -> list[RunId]:
    keys = connection.scalars(select(META.c.key).where(META.c.key.startswith(_DELETED, autoescape=True)))
    return [RunId(key.removeprefix(_DELETED)) for key in keys]


def run_rows(connection: Connection) -> list[RunRow]:
    """Return the result of `Journal.runs` within a transaction of the caller."""
    return [_read_run(row) for row in connection.execute(select(RUNS).order_by(RUNS.c.order, RUNS.c.run_id))]


def evaluation_of(row: Row[Any]) -> EvaluationRow:
    """Return an evaluation from its row."""
    statistics = row.statistics and {name: tuple(sums) for name, sums in row.statistics.items()}
    return EvaluationRow(
        row.run_id, row.version, row.source, statistics, row.num_clients, row.detail, row.at, row._mapping["values"]
    )


def _read_run(row: Row[Any]) -> RunRow:
    where = f"run {row.run_id}"
    try:
        config, state = _config(row.config), RunState(row.state)
    except ValueError as error:
        raise StoreCorrupted(f"{where}: not a configuration: {error}") from error
    rules = decode_rules(row.rules, where=f"{where}, rules")
    return RunRow(row.run_id, config, rules, row.created_at, row.order, state, row.cause, row.ended_at)


def _values(row: Any) -> dict[str, Any]:
    kind: Any = type(row)
    names, values = _columns(kind)
    return dict(zip(names, values(row), strict=True))


@cache
def _columns(kind: Any) -> tuple[tuple[str, ...], Callable[[Any], tuple[Any, ...]]]:
    names = tuple(part.name for part in fields(kind))
    return names, attrgetter(*names)


def _run_values(row: RunRow) -> dict[str, Any]:
    config = row.config
    texts = {"config": config.model_dump_json(), "rules": encode_rules(row.rules)}
    return {**_values(row), "name": config.name, "task": config.task, **texts}


def _entry_values(row: Entry) -> tuple[Any, ...]:
    """Return the values in the order of the table's columns, without a dictionary: most rows are entries."""
    run_id, seq, at, kind, body = row.run_id, row.seq, row.at, row.kind, row.body
    return run_id, seq, at, kind, body, checksums.of_entry(seq, at, kind, body)


def _checked(row: Snapshot | Page) -> dict[str, Any]:
    checksum = checksums.of_snapshot(row) if isinstance(row, Snapshot) else checksums.of_page(row)
    return {**_values(row), "checksum": checksum}
