"""The files that the runs of a journal need: accepted updates, versions of the model, replies, contents of messages.

Each accepted update whose bytes are not in the journal has a file, and so have the global model and each version that a
decision may still need.
"""

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path

from sqlalchemy import Connection, select

from atoll.protocol.settings import ConfigError
from atoll.protocol.vocabulary import TERMINAL, ClientId, Digest, Fate, RoundId, RunId, RunState, Version
from atoll.server.config.run import RunConfig
from atoll.server.exchanges.machine import ExchangeMachine
from atoll.server.folding.method import Method
from atoll.server.journal.binding import open_database
from atoll.server.journal.codec import StoredUpdateMeta, decode_meta
from atoll.server.journal.exchanges import recover_exchanges
from atoll.server.journal.recovery import recover
from atoll.server.journal.rows import RunRow, run_rows
from atoll.server.journal.schema import UPDATES, VERSIONS, check_version
from atoll.server.required.keep import Keep
from atoll.server.rounds.events import Update
from atoll.server.rounds.run_machine import RunMachine


@dataclass(frozen=True, slots=True)
class Need:
    """Run after the last entry of its journal, and the files that it needs."""

    run_id: RunId
    state: RunState
    version: Version
    next_round: RoundId
    digests: Mapping[Version, Digest] = field(default_factory=dict)
    """Needed versions with their digests; an empty digest is not known yet."""
    updates: Mapping[Digest, StoredUpdateMeta] = field(default_factory=dict)
    """Needed accepted updates whose bytes are in files."""
    is_of_messages: bool = False
    contents: frozenset[Digest] = frozenset()
    """The contents of messages whose exchanges are open."""
    senders: Mapping[Digest, tuple[ClientId, RoundId]] = field(default_factory=dict)
    """The client and the round, or the message, of each update."""
    slots: tuple[str, ...] = ()
    """The names of the server optimizer's tensors beside the current version."""
    best: Version | None = None
    anchored: Mapping[Version, tuple[Digest, ...]] = field(default_factory=dict)
    """Accepted updates of FedAsync whose step needs an older version, by that version."""

    @property
    def is_open(self) -> bool:
        """Return whether the run may continue by itself."""
        return self.state not in TERMINAL


def needs_of(path: Path, database: str = "") -> list[Need]:
    """Return the needs of all runs of a state directory, at one instant.

    Args:
        path: the directory.
        database: the URL of its journal; empty: the URL that the directory names.

    Raises:
        StoreCorrupted: the journal cannot be replayed.
        StateUnusable: the journal cannot be opened, or lacks Atoll's schema.
    """
    opened = open_database(path, database, read_only=True)
    try:
        with opened.transaction() as connection:
            check_version(connection, opened.name)
            return needs_in(connection)
    finally:
        opened.close()


def needs_in(connection: Connection) -> list[Need]:
    """Return the needs of all runs in an open journal; raises StoreCorrupted."""
    return [_need(connection, row) for row in run_rows(connection)]


def _need(connection: Connection, row: RunRow) -> Need:
    if row.config.is_of_messages:
        recovered = recover_exchanges(connection, row.run_id)
        machine = recovered.replayed(ExchangeMachine(row.config.exchange_rules, recovered.ledger))
        return need_of_messages(connection, row.run_id, machine)
    return need_of_rounds(connection, row.run_id, row.config, recover(connection, row.run_id).replay(row.rules))


def need_of_rounds(
    connection: Connection, run_id: RunId, config: RunConfig, machine: RunMachine, *, loads_code: bool = False
) -> Need:
    """Return the needs of a run of rounds.

    Args:
        connection: the journal's connection.
        run_id: the run.
        config: its settings.
        machine: its machine, which has received every entry.
        loads_code: whether a custom optimizer may be loaded, to learn the names of its tensors.
    """
    keep, ledger = Keep.after(0, machine, config.round), machine.ledger
    rows = connection.execute(select(VERSIONS).where(VERSIONS.c.run_id == run_id))
    wanted = {Version(0), *_versions(machine)}.difference(ledger.lost)
    digests = {version: Digest("") for version in {Version(0), ledger.version} & wanted}  # before the run begins
    digests |= {Version(v.version): Digest(v.digest) for v in rows if v.version in wanted}
    held = [*ledger.carried.values(), *ledger.waiting, *(machine.round.held if machine.round else ())]
    return Need(
        run_id,
        ledger.state,
        ledger.version,
        ledger.next_round,
        digests,
        _in_files(connection, run_id, f"run {run_id}, update", keep.updates.__contains__),
        senders={update.digest: (update.client_id, update.round_id) for update in held},
        slots=_slots(config, loads_code=loads_code) if ledger.version and ledger.state not in TERMINAL else (),
        best=None if ledger.best is None else ledger.best.version,
        anchored=_anchored(machine, held),
    )


def _versions(machine: RunMachine) -> Iterator[Version]:
    """Yield the versions that a decision may still need; late updates of older versions need only the digests."""
    ledger = machine.ledger
    yield ledger.version
    yield from (() if ledger.best is None else (ledger.best.version,))
    if ledger.state in TERMINAL:
        return
    yield from ledger.unevaluated
    yield from (effect.version for effect in ledger.computing)
    records = (machine.record_of(round_id) for round_id in ledger.training.values())
    yield from (record.base_version for record in records if record is not None)
    yield from _anchored(machine, [*ledger.waiting, *(machine.round.held if machine.round else ())])


def _slots(config: RunConfig, *, loads_code: bool) -> tuple[str, ...]:
    if (config.optimizer.is_own or config.aggregation.has_own_rule) and not loads_code:
        return ()
    try:
        return Method.of(config.aggregation, config.optimizer, sums_here=False).slots
    except ConfigError:
        return ()  # the start reports the fault


def _anchored(machine: RunMachine, held: list[Update]) -> dict[Version, tuple[Digest, ...]]:
    if machine.rules.policy.mode != "fedasync":
        return {}
    bases = {update.base_version for update in held}
    return {base: tuple(update.digest for update in held if update.base_version == base) for base in bases}


def need_of_messages(connection: Connection, run_id: RunId, machine: ExchangeMachine) -> Need:
    """Return the needs of a run of messages: every kept reply, because its program may restart, and more."""
    ledger = machine.ledger
    of_open = [sent for exchange in ledger.open.values() for sent in exchange.sent]
    return Need(
        run_id,
        ledger.state,
        Version(0),
        RoundId(1),
        is_of_messages=True,
        updates=_in_files(connection, run_id, f"run {run_id}, reply", lambda digest: True),
        contents=frozenset(sent.message.content for sent in of_open if sent.fate is Fate.WAITING),
        senders={sent.reply: (sent.message.client_id, sent.number) for sent in of_open if sent.reply is not None},
    )


def _in_files(
    connection: Connection, run_id: RunId, where: str, is_needed: Callable[[Digest], bool]
) -> dict[Digest, StoredUpdateMeta]:
    """Return the needed updates whose bytes are not in the journal, with their metadata."""
    of_run = select(UPDATES.c.digest, UPDATES.c.meta).where(UPDATES.c.run_id == run_id, UPDATES.c.data.is_(None))
    found = ((Digest(digest), meta) for digest, meta in connection.execute(of_run))
    return {digest: decode_meta(meta, where=f"{where} {digest}") for digest, meta in found if is_needed(digest)}
