"""The rows of the journal's tables, as values, and what reads and writes several of them at once."""

import json
from collections.abc import Mapping, Sequence
from dataclasses import InitVar, dataclass, field
from typing import Any, Self

from sqlalchemy import Connection, Row, select

from atoll.plugins.kind import AS_RECORDED
from atoll.protocol.settings import ConfigError, load_recorded
from atoll.protocol.vocabulary import Digest, Phase, RoundId, RunId, RunState, Version
from atoll.server.config.run import RunConfig
from atoll.server.errors import StoreCorrupted
from atoll.server.exchanges.exchange import Exchange
from atoll.server.exchanges.exchange_summary import summary as summary_of_exchange
from atoll.server.journal.codec import as_of_then, decode_rules, encode
from atoll.server.journal.member_rows import Page
from atoll.server.journal.schema import RUNS
from atoll.server.journal.statements import Statements
from atoll.server.rounds.events import Sums
from atoll.server.rounds.record import RoundRecord
from atoll.server.rounds.round_summary import summary as summary_of_round
from atoll.server.rounds.run_rules import RunRules


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
class RecordRow:
    """Record of a round, from `encode_record`; a later row of the same round replaces it."""

    run_id: RunId
    record: str
    of: InitVar[RoundRecord]
    round_id: RoundId = field(init=False)
    phase: Phase = field(init=False)
    version: Version | None = field(init=False)
    summary: str = field(init=False)
    clients: tuple[tuple[str, str, int, int], ...] = field(init=False)
    """Each client with its fate, its invitations (1), and whether its update is in a model (0 or 1)."""

    def __post_init__(self, of: RoundRecord) -> None:
        for name in ("round_id", "phase", "version"):
            object.__setattr__(self, name, getattr(of, name))
        object.__setattr__(self, "summary", json.dumps(summary_of_round(of)))
        clients = ((name, str(one.fate), 1, int(one.used_in is not None)) for name, one in of.clients.items())
        object.__setattr__(self, "clients", tuple(clients))


@dataclass(frozen=True, slots=True)
class ExchangeRow:
    """Record of a closed exchange, the counterpart of a round's."""

    run_id: RunId
    round_id: int
    record: str
    phase: str
    summary: str
    clients: tuple[tuple[str, str, int, int], ...]
    """Each node with the fate of its last message, its messages, and its replies."""
    version: None = None

    @classmethod
    def of(cls, run_id: RunId, exchange: Exchange) -> Self:
        """Return the row of an exchange."""
        clients: dict[str, tuple[str, str, int, int]] = {}
        for one in exchange.sent:
            name = one.message.client_id
            _, _, sent, replied = clients.get(name, ("", "", 0, 0))
            clients[name] = (name, str(one.fate), sent + 1, replied + (one.reply is not None))
        summary = json.dumps(summary_of_exchange(exchange))
        record, reason = encode(exchange), str(exchange.close_reason)
        return cls(run_id, exchange.number, record, reason, summary, tuple(clients.values()))


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


def run_rows(connection: Connection) -> list[RunRow]:
    """Return the result of `Journal.runs` within a transaction of the caller."""
    return [_read_run(row) for row in connection.execute(select(RUNS).order_by(RUNS.c.order, RUNS.c.run_id))]


def evaluation_of(row: Row[Any]) -> EvaluationRow:
    """Return an evaluation from its row."""
    statistics = row.statistics and {name: tuple(sums) for name, sums in row.statistics.items()}
    return EvaluationRow(
        row.run_id, row.version, row.source, statistics, row.num_clients, row.detail, row.at, row._mapping["values"]
    )


def write_summaries(connection: Connection, sql: Statements, records: Sequence[RecordRow | ExchangeRow]) -> None:
    """Write the summary of each record, and the part of each of its clients, within a transaction of the caller."""
    newest = {(row.run_id, row.round_id): row for row in records}.values()  # one statement writes a row only once
    if newest:
        summaries = [{"run_id": row.run_id, "round_id": row.round_id, "summary": row.summary} for row in newest]
        connection.execute(sql.upsert_summary, summaries)
    if parts := [(row.run_id, one[0], row.round_id, *one[1:]) for row in newest for one in row.clients]:
        connection.exec_driver_sql(sql.upsert_participation, parts)


def _read_run(row: Row[Any]) -> RunRow:
    where = f"run {row.run_id}"
    config = config_of(row.config, row.run_id)
    try:
        state = RunState(row.state)
    except ValueError as error:
        raise StoreCorrupted(f"{where}: not a state: {error}") from error
    rules = decode_rules(row.rules, where=f"{where}, rules")
    return RunRow(row.run_id, config, rules, row.created_at, row.order, state, row.cause, row.ended_at)


def config_of(text: str, run_id: RunId) -> RunConfig:
    """Return settings of a run from their row, an earlier Atoll's with its behaviour.

    Raises:
        StoreCorrupted: they are damaged, or this Atoll does not allow them.
    """
    try:
        return load_recorded(RunConfig, as_of_then(text, "round"), context=AS_RECORDED)
    except ConfigError as error:
        faults = "; ".join(error.faults)
    except (ValueError, RecursionError):
        faults = "no settings in JSON"
    out = "use the Atoll that has written them, or restore a backup of the state directory"
    raise StoreCorrupted(f"run {run_id}: this Atoll does not allow its stored settings: {faults}: {out}")
