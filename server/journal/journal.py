"""The journal, a write-ahead log: every event of every run is durable before its effects are carried out.

Beside the events the journal stores snapshots, the records of rounds, and the updates. A group commit is atomic: if
`commit` returns, its whole batch is on disk; if it raises, nothing of the batch is, and the same batch may be committed
again. The caller encodes the values when it fills a batch, so that a commit may run on a thread while the machines
continue. Entries, snapshots and pages carry checksums; a damaged row is never replayed.
"""

import json
from collections.abc import Callable, Collection, Sequence
from dataclasses import fields, replace
from functools import cache
from operator import attrgetter
from typing import Any, TypeVar

from sqlalchemy import Connection, delete, func, select, update

from atoll.protocol.vocabulary import Digest, RoundId, RunId
from atoll.server.config.run import RunConfig
from atoll.server.errors import StoreCorrupted
from atoll.server.exchanges.exchange import Exchange
from atoll.server.exchanges.ledger import Ledger as LedgerOfMessages
from atoll.server.journal import checksums
from atoll.server.journal.codec import encode_rules
from atoll.server.journal.exchanges import read_exchanges, recover_exchanges
from atoll.server.journal.member_rows import Page
from atoll.server.journal.pruning import Stay, prune
from atoll.server.journal.recovery import Recovered, RecoveredRounds, recover
from atoll.server.journal.reveals import forget_reveals
from atoll.server.journal.rows import (
    Batch,
    Entry,
    EvaluationRow,
    ExchangeRow,
    RecordRow,
    RunRow,
    SettingsChange,
    Snapshot,
    UpdateRow,
    config_of,
    evaluation_of,
    run_rows,
    write_summaries,
)
from atoll.server.journal.schema import (
    EVALUATIONS,
    JOURNAL,
    MEMBERS,
    META,
    PARTICIPATIONS,
    ROUNDS,
    RUNS,
    SNAPSHOTS,
    SUMMARIES,
    UPDATES,
    VERSIONS,
)
from atoll.server.journal.state_directory import StateDirectory
from atoll.server.journal.statements import SELECT_UPDATES, statements

T = TypeVar("T")

UPDATES_AT_ONCE = 500
"""Largest number of updates in one query."""

_DELETED = "deleted run "
"""Prefix of a key of the table `meta`, followed by the id of a deleted run."""

_FIRST = "first settings of run "
_CHANGED = "changed settings of run "
"""Prefix of a key of the table `meta`, followed by the id of a run whose settings a resume has changed."""


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
        return None if text is None else config_of(text, run_id)

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
            of_rounds = (ROUNDS, SUMMARIES, PARTICIPATIONS)
            for table in (RUNS, JOURNAL, SNAPSHOTS, MEMBERS, *of_rounds, VERSIONS, UPDATES, EVALUATIONS):
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
            (sql.upsert_round, [_record_values(row) for row in batch.records]),
            (sql.upsert_version, [_values(row) for row in batch.versions]),
            (sql.upsert_evaluation, [_values(row) for row in batch.evaluations]),
        ):
            if rows:
                connection.execute(statement, rows)
        write_summaries(connection, sql, batch.records)
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
        SettingsChange(run_id, config_of(first, run_id), 0, 0.0, RoundId(1)),
        *(_settings_change(run_id, int(row.key.removeprefix(begin)), json.loads(row.value)) for row in rows),
    ]


def _settings_change(run_id: RunId, seq: int, fields: dict[str, Any]) -> SettingsChange:
    return SettingsChange(run_id, config_of(fields["config"], run_id), seq, fields["at"], RoundId(fields["round"]))


def _deleted(connection: Connection) -> list[RunId]:
    keys = connection.scalars(select(META.c.key).where(META.c.key.startswith(_DELETED, autoescape=True)))
    return [RunId(key.removeprefix(_DELETED)) for key in keys]


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


def _record_values(row: RecordRow | ExchangeRow) -> dict[str, Any]:
    return {name: getattr(row, name) for name in ROUNDS.columns.keys()}  # noqa: SIM118 - not a mapping
