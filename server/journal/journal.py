"""The journal: every event of every run, durable before its effects leave. With it snapshots, records, and updates.

When `commit` returns, everything in its batch is on disk; when it raises, nothing of it is, and the same batch may be
committed again. Values are encoded by whoever fills a batch, at the moment when they are true, so that a commit may
run on a thread of its own while the machines go on. Every entry and every snapshot carries a checksum: what cannot be
trusted is never replayed.
"""

import zlib
from collections.abc import Callable, Container, Iterator, Mapping, Sequence
from dataclasses import InitVar, dataclass, field, fields, replace
from functools import cache
from operator import attrgetter
from typing import Any, Self

from sqlalchemy import Connection, Row, Table, delete, func, select, update

from atoll.protocol.vocabulary import ClientId, Digest, Phase, RoundId, RunId, RunState, Version
from atoll.server.config.run import RunConfig
from atoll.server.errors import StoreCorrupted
from atoll.server.journal.codec import decode_event, decode_ledger, decode_page, decode_rules, encode_rules
from atoll.server.journal.schema import EVALUATIONS, JOURNAL, MEMBERS, META, ROUNDS, RUNS, SNAPSHOTS, UPDATES, VERSIONS
from atoll.server.journal.state_directory import StateDirectory
from atoll.server.journal.statements import DELETE_UPDATE, SELECT_UPDATES, statements
from atoll.server.rounds.events import Event, Sums
from atoll.server.rounds.ledger import Ledger
from atoll.server.rounds.member import Member
from atoll.server.rounds.record import RoundRecord
from atoll.server.rounds.run_machine import RunMachine
from atoll.server.rounds.update_intake import RunRules

UPDATES_AT_ONCE = 500

_DELETED = "deleted run "
"""Before the id of a run, in the table of what else is known."""

# ---------------------------------------------------------------- what is written


@dataclass(frozen=True, slots=True)
class RunRow:
    """A run as it was asked for, and what became of it."""

    run_id: RunId
    config: RunConfig
    rules: RunRules
    created_at: float
    order: int = 0  # its place in the queue: `add_run` gives it the last one
    state: RunState = RunState.QUEUED
    cause: str = ""
    ended_at: float | None = None

    @classmethod
    def new(cls, run_id: RunId, config: RunConfig, rules: RunRules, now: float) -> Self:
        """A run that waits for its turn."""
        return cls(run_id, config, rules, now)

    @property
    def name(self) -> str:
        """What the operator calls it; runs may share a name."""
        return self.config.name


@dataclass(frozen=True, slots=True)
class RunChange:
    """A run has left the queue, rests, goes on, or has ended."""

    run_id: RunId
    state: RunState
    cause: str = ""
    ended_at: float | None = None


@dataclass(frozen=True, slots=True)
class Entry:
    """One event: `seq` is 1, 2, 3, ... within its run; kind and body from `encode_event`."""

    run_id: RunId
    seq: int
    at: float
    kind: str
    body: str


@dataclass(frozen=True, slots=True)
class Snapshot:
    """The ledger as the entry `seq` left it: from `encode_ledger_without_members`, or (no members) `encode_ledger`."""

    run_id: RunId
    seq: int
    at: float
    body: str
    first: int = 0  # the entry from which on the pages of its members are read
    num_members: int = 0


@dataclass(frozen=True, slots=True)
class Page:
    """Members that had changed when the snapshot `seq` was taken, from `encode_page`."""

    run_id: RunId
    seq: int
    page: int
    body: str


@dataclass(frozen=True, slots=True)
class RecordRow:
    """A round's record, from `encode_record`; a later one of the same round takes its place."""

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
class VersionRow:
    """A version whose file is durable; `digest` is of its manifest."""

    run_id: RunId
    version: Version
    digest: Digest
    num_bytes: int
    created_at: float


@dataclass(frozen=True, slots=True)
class EvaluationRow:
    """What a version is worth, by the server's data or the clients'; without statistics `detail` says why.

    `values`: of the task's metrics, from the sums; None where a metric is undefined.
    """

    run_id: RunId
    version: Version
    source: str  # "server" or "clients"
    statistics: Sums | None
    num_clients: int
    detail: str
    at: float
    values: Mapping[str, float | None] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class UpdateRow:
    """What is known of an accepted update, from `encode_meta`, and all bytes of one that has no file."""

    run_id: RunId
    digest: Digest
    meta: str
    data: bytes | None


@dataclass(slots=True)
class Batch:
    """Everything of one group commit."""

    entries: list[Entry] = field(default_factory=list)
    updates: list[UpdateRow] = field(default_factory=list)
    snapshots: list[Snapshot] = field(default_factory=list)
    members: list[Page] = field(default_factory=list)
    records: list[RecordRow] = field(default_factory=list)
    versions: list[VersionRow] = field(default_factory=list)
    evaluations: list[EvaluationRow] = field(default_factory=list)
    runs: list[RunRow] = field(default_factory=list)  # new, or with other settings
    changes: list[RunChange] = field(default_factory=list)  # in the order in which they happened


# ---------------------------------------------------------------- what is read back


@dataclass(frozen=True, slots=True)
class Happened:
    """One entry, read back."""

    seq: int
    at: float
    event: Event


@dataclass(frozen=True, slots=True)
class Recovered:
    """The last good snapshot of a run (none: an empty ledger) and everything that happened since."""

    ledger: Ledger
    snapshot_seq: int
    entries: tuple[Happened, ...]
    faults: tuple[str, ...] = ()  # of newer snapshots that were passed over: an operator should know

    @property
    def seq(self) -> int:
        """Of the last entry; the next one has one more."""
        return self.entries[-1].seq if self.entries else self.snapshot_seq

    def replay(self, rules: RunRules) -> RunMachine:
        """The machine as the last entry left it; this takes the ledger, so it is done once."""
        machine = RunMachine(rules, self.ledger)
        for entry in self.entries:
            machine.receive(entry.event, entry.at)
        return machine


class Journal:
    """Writes and reads back; one thread at a time."""

    def __init__(self, state: StateDirectory) -> None:
        self._database = state.database
        self._statements = statements(state.database.dialect)

    def add_run(self, row: RunRow) -> None:
        """Write down a new run, last in the queue; raises as `commit`."""

        def add(connection: Connection) -> None:
            last = connection.scalar(select(func.max(RUNS.c.order))) or 0
            connection.execute(RUNS.insert(), _run_values(replace(row, order=last + 1)))

        self._database.write(add)

    def runs(self) -> list[RunRow]:
        """Every run, in the order of the queue."""
        return self._database.read(run_rows)

    def next_number(self, name: str) -> int:
        """Of the next run of this name: no run, also a deleted one, ever had the id that it makes."""
        ids = self._database.read(
            lambda connection: [*connection.scalars(select(RUNS.c.run_id)), *_deleted(connection)]
        )
        tails = (run_id.removeprefix(f"{name}-") for run_id in ids if run_id.startswith(f"{name}-"))
        return 1 + max((int(tail) for tail in tails if tail.isdecimal()), default=0)

    def delete_run(self, run_id: RunId) -> None:
        """Forget everything of a run but that it was here; raises as `commit`."""

        def drop(connection: Connection) -> None:
            for table in (RUNS, JOURNAL, SNAPSHOTS, MEMBERS, ROUNDS, VERSIONS, UPDATES, EVALUATIONS):
                connection.execute(delete(table).where(table.c.run_id == run_id))
            connection.execute(META.insert().values(key=f"{_DELETED}{run_id}", value=""))

        self._database.write(drop)

    def deleted_runs(self) -> list[RunId]:
        """Those whose files may still be there."""
        return self._database.read(_deleted)

    def last_instant(self) -> float:
        """The latest time that any event or snapshot holds; 0 when there is none."""
        return self._database.read(
            lambda connection: max(
                connection.scalar(select(func.max(table.c.at))) or 0.0 for table in (JOURNAL, SNAPSHOTS)
            )
        )

    def commit(self, batch: Batch) -> None:
        """Write a batch in one transaction; it is on disk when this returns.

        Raises:
            DiskFull: nothing of it was written; try again when there is room.
        """
        self._database.write(lambda connection: self._write(connection, batch))

    def _write(self, connection: Connection, batch: Batch) -> None:
        say = self._statements
        for statement, rows in (
            (say.upsert_run, [_run_values(row) for row in batch.runs]),
            (say.insert_update, [_values(row) for row in batch.updates]),
            (say.upsert_snapshot, [_checked(row) for row in batch.snapshots]),
            (say.upsert_page, [_checked(row) for row in batch.members]),
            (say.upsert_round, [_values(row) for row in batch.records]),
            (say.upsert_version, [_values(row) for row in batch.versions]),
            (say.upsert_evaluation, [_values(row) for row in batch.evaluations]),
        ):
            if rows:
                connection.execute(statement, rows)
        if batch.entries:
            connection.exec_driver_sql(say.insert_entry, [_entry_values(row) for row in batch.entries])
        for change in batch.changes:
            connection.execute(update(RUNS).where(RUNS.c.run_id == change.run_id).values(_values(change)))

    def load(self, run_id: RunId) -> Recovered:
        """The last good snapshot and what happened since.

        Raises:
            StoreCorrupted: an entry that is needed is missing or damaged.
        """
        return self._database.read(lambda connection: recovered(connection, run_id))

    def updates(self, run_id: RunId, digests: Sequence[Digest]) -> dict[Digest, UpdateRow]:
        """Accepted updates of a run.

        Raises:
            StoreCorrupted: one of them is missing.
        """

        def find(connection: Connection) -> dict[Digest, UpdateRow]:
            found: dict[Digest, UpdateRow] = {}
            for begin in range(0, len(digests), UPDATES_AT_ONCE):
                some = {"run_id": run_id, "digests": digests[begin : begin + UPDATES_AT_ONCE]}
                found.update({row.digest: UpdateRow(*row) for row in connection.execute(SELECT_UPDATES, some)})
            return found

        found = self._database.read(find)
        if missing := sorted(set(digests) - set(found)):
            raise StoreCorrupted(f"run {run_id}: nothing is known of the updates {', '.join(missing[:5])}")
        return found

    def close(self) -> None:
        """Let go of the database; what was committed is on disk already."""
        self._database.close()

    def prune(
        self,
        run_id: RunId,
        *,
        keep_snapshots: int = 2,
        keep_rounds: int | None = None,
        live: Container[Digest] | None = None,
    ) -> None:
        """Drop the oldest: snapshots beyond the last few and the entries that these have made superfluous.

        Records, versions and evaluations stay; with `keep_rounds` only the records of the newest rounds do. Of the
        accepted updates those stay that are `live` (left out: all), which is asked when nothing else is being written.
        """

        def drop(connection: Connection) -> None:
            if live is not None:
                _drop_updates(connection, run_id, live)
            oldest = connection.scalar(_nth_newest(SNAPSHOTS, "seq", run_id, keep_snapshots))
            if oldest is not None:
                _drop_before(connection, run_id, oldest)
            if keep_rounds is None:
                return
            first = connection.scalar(_nth_newest(ROUNDS, "round_id", run_id, keep_rounds))
            if first is not None:
                connection.execute(delete(ROUNDS).where(ROUNDS.c.run_id == run_id, ROUNDS.c.round_id < first))

        self._database.write(drop)


def _deleted(connection: Connection) -> list[RunId]:
    keys = connection.scalars(select(META.c.key).where(META.c.key.startswith(_DELETED, autoescape=True)))
    return [RunId(key.removeprefix(_DELETED)) for key in keys]


def run_rows(connection: Connection) -> list[RunRow]:
    """What `Journal.runs` gives, within a transaction of the caller's."""
    return [_read_run(row) for row in connection.execute(select(RUNS).order_by(RUNS.c.order, RUNS.c.run_id))]


def _read_run(row: Row[Any]) -> RunRow:
    where = f"run {row.run_id}"
    try:
        config, state = RunConfig.model_validate_json(row.config), RunState(row.state)
    except ValueError as error:
        raise StoreCorrupted(f"{where}: not a configuration: {error}") from error
    rules = decode_rules(row.rules, where=f"{where}, rules")
    return RunRow(row.run_id, config, rules, row.created_at, row.order, state, row.cause, row.ended_at)


def recovered(connection: Connection, run_id: RunId) -> Recovered:
    """What `Journal.load` gives, within a transaction of the caller's."""
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
    entries: list[Happened] = []
    for expected, row in enumerate(connection.execute(later), start=seq + 1):
        if row.seq != expected:
            raise StoreCorrupted("; ".join([*faults, f"run {run_id}: entry {expected} is missing before {row.seq}"]))
        entries.append(_read_entry(row))
    if faults and not seq and not entries:
        raise StoreCorrupted("; ".join([*faults, f"run {run_id}: no entry is left to replay instead"]))
    return Recovered(ledger, seq, tuple(entries), tuple(faults))


def _read_snapshot(connection: Connection, row: Row[Any]) -> Ledger:
    where = f"run {row.run_id}, snapshot {row.seq}"
    if _checksum(row.seq, row.at, row.body, *_members_of(row)) != row.checksum:
        raise StoreCorrupted(f"{where}: its checksum is wrong")
    ledger = decode_ledger(row.body, where=where)
    if row.num_members:
        membership = ledger.membership
        membership.read(_read_pages(connection, row, where), first=row.first)
        if len(membership.members) != row.num_members:
            raise StoreCorrupted(f"{where}: {len(membership.members)} of its {row.num_members} members are there")
    return ledger


def _read_pages(connection: Connection, row: Row[Any], where: str) -> Iterator[tuple[int, dict[ClientId, Member]]]:
    of_snapshot = (MEMBERS.c.run_id == row.run_id, MEMBERS.c.seq.between(row.first, row.seq))
    for page in connection.execute(select(MEMBERS).where(*of_snapshot).order_by(MEMBERS.c.seq, MEMBERS.c.page)):
        place = f"{where}, page {page.page} of entry {page.seq}"
        if _checksum(page.seq, 0.0, str(page.page), page.body) != page.checksum:
            raise StoreCorrupted(f"{place}: its checksum is wrong")
        yield page.seq, decode_page(page.body, where=place)


def _read_entry(row: Row[Any]) -> Happened:
    where = f"run {row.run_id}, entry {row.seq}"
    if _checksum(row.seq, row.at, row.kind, row.body) != row.checksum:
        raise StoreCorrupted(f"{where}: its checksum is wrong")
    return Happened(row.seq, row.at, decode_event(row.kind, row.body, where=where))


# ---------------------------------------------------------------- rows


def _drop_before(connection: Connection, run_id: RunId, oldest: int) -> None:
    """What no snapshot from `oldest` on needs: older ones, the entries that led to it, the pages of its forerunners."""
    first = connection.scalar(select(SNAPSHOTS.c.first).where(SNAPSHOTS.c.run_id == run_id, SNAPSHOTS.c.seq == oldest))
    connection.execute(delete(SNAPSHOTS).where(SNAPSHOTS.c.run_id == run_id, SNAPSHOTS.c.seq < oldest))
    connection.execute(delete(JOURNAL).where(JOURNAL.c.run_id == run_id, JOURNAL.c.seq <= oldest))
    connection.execute(delete(MEMBERS).where(MEMBERS.c.run_id == run_id, MEMBERS.c.seq < first))


def _nth_newest(table: Table, column: str, run_id: RunId, n: int) -> Any:
    assert n >= 1, n
    of_run = select(table.c[column]).where(table.c.run_id == run_id)
    return of_run.order_by(table.c[column].desc()).offset(n - 1).limit(1)


def _drop_updates(connection: Connection, run_id: RunId, live: Container[Digest]) -> None:
    digests = connection.scalars(select(UPDATES.c.digest).where(UPDATES.c.run_id == run_id))
    if dead := [{"run": run_id, "dead": digest} for digest in digests if digest not in live]:
        connection.execute(DELETE_UPDATE, dead)


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
    """In the order of the table's columns: of these there are by far the most."""
    run_id, seq, at, kind, body = row.run_id, row.seq, row.at, row.kind, row.body
    return run_id, seq, at, kind, body, _checksum(seq, at, kind, body)


def _checked(row: Snapshot | Page) -> dict[str, Any]:
    match row:
        case Snapshot():
            checksum = _checksum(row.seq, row.at, row.body, *_members_of(row))
        case Page():
            checksum = _checksum(row.seq, 0.0, str(row.page), row.body)
    return {**_values(row), "checksum": checksum}


def _members_of(row: Any) -> tuple[str, ...]:
    """What is under a snapshot's checksum besides its body; nothing of one that schema 2 wrote."""
    return (str(row.first), str(row.num_members)) if row.num_members else ()


def _checksum(seq: int, at: float, *parts: str) -> int:
    """Of everything in the row; `at` as the float that it is stored as."""
    return zlib.crc32("\0".join((str(seq), repr(float(at)), *parts)).encode())
