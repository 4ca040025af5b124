"""The history of a state directory for the command line: runs, rounds, versions, evaluations, clients.

It only reads the disk and takes no lock, so it works beside a coordinator and after one has crashed. The open round is
in no table: its record comes from a replay of the last snapshot and the journal's entries since.
"""

import json
import time
from collections.abc import Callable, Collection, Iterator, Sequence
from dataclasses import replace
from functools import partial
from itertools import islice
from pathlib import Path
from typing import Any, TypeVar

from pydantic_core import from_json
from sqlalchemy import Connection, Row, Table, and_, func, or_, select, text

from atoll.protocol.identity.names import Role
from atoll.protocol.notices.book_file import conditions_shown, notices_shown
from atoll.protocol.notices.notice import Notice
from atoll.protocol.paging import ALL, Paging
from atoll.protocol.run_names import RunNotNamed, newest_named
from atoll.protocol.vocabulary import TERMINAL, ClientId, RoundId, RunId, RunState
from atoll.server.errors import StateUnusable
from atoll.server.identity.register import Member, ends_of_processes, members_in
from atoll.server.journal.binding import has_state, open_database
from atoll.server.journal.clock_note import ClockNote
from atoll.server.journal.codec import decode_record
from atoll.server.journal.holder import RunningCoordinator, is_held, running_coordinator
from atoll.server.journal.journal import settings_of
from atoll.server.journal.member_rows import MemberReader
from atoll.server.journal.recovery import BareBase, last_seq, read_bare_base, recover
from atoll.server.journal.rows import EvaluationRow, RunRow, SettingsChange, VersionRow, evaluation_of, run_rows
from atoll.server.journal.schema import (
    EVALUATIONS,
    PARTICIPATIONS,
    ROUNDS,
    SCHEMA_VERSION,
    SUMMARIES,
    VERSIONS,
    check_version,
)
from atoll.server.journal.sources import WHOLE
from atoll.server.members.member import Member as MemberOfRun
from atoll.server.members.member_pages import PAGE
from atoll.server.members.membership import Membership
from atoll.server.names.places import conflicts_shown
from atoll.server.names.presence import Presence, presence_shown
from atoll.server.rounds.record import RoundRecord
from atoll.server.rounds.run_machine import RunMachine
from atoll.task.metrics import LEFT_OUT

T = TypeVar("T")
Numbered = tuple[str, dict[str, Any]]
Measured = tuple[int, dict[str, list[float]] | int, dict[str, float | None]]

UNMEASURED_MAX = 1_000
"""Largest number of evaluations without a metric in the document of a run."""

MEMBERS_REPLAYED_MAX = 2_000
"""Largest number of members for which a page of the clients of a run with an open round replays the journal."""


class History:
    """State directory for reading; every method sees the state of one instant."""

    def __init__(self, path: Path, database: str = "") -> None:
        """Open the database for reading and check its version.

        Args:
            path: the state directory; with a database it may be on another machine.
            database: the URL of its database; empty: the URL that the directory names.

        Raises:
            StateUnusable: `path` is not a state directory, or there is no such database.
            DatabaseAway: the database server does not answer.
            StateTooNew: a later Atoll has written the database.
            StoreCorrupted: the database is damaged.
        """
        self.path = path.absolute()
        if not database and not has_state(self.path):
            raise StateUnusable(f"{self.path} is not a state directory: there is no state.db in it")
        self._database = open_database(self.path, database, read_only=True)
        with self._database.transaction() as connection:
            where = self.path if self._database.dialect == "sqlite" else self._database.name
            if (version := check_version(connection, where)) < SCHEMA_VERSION:
                what = f"{where} has schema version {version}, and the views of this Atoll need {SCHEMA_VERSION}"
                raise StateUnusable(f"{what}: its coordinator brings it to that when it starts with this Atoll")

    def coordinator(self) -> RunningCoordinator | None:
        """Return the process that holds the directory now; None: there is none."""
        return running_coordinator(self.path)

    def conflicts(self) -> list[dict[str, Any]]:
        """Return the names that two processes use now, see `names/places`; empty without a coordinator."""
        return [] if self.coordinator() is None else conflicts_shown(self.path, time.time())

    def clocks(self) -> list[str]:
        """Return the messages about clocks that differ now, see `hosting/clock_watch`; empty without a coordinator."""
        note = None if self.coordinator() is None else ClockNote.read(self.path)
        return [] if note is None else note.told

    def notices(self) -> list[str]:
        """Return the conditions that an operator has to know, see `hosting/notices`; empty without a coordinator."""
        return [] if self.coordinator() is None else notices_shown(self.path)

    def conditions(self) -> list[Notice]:
        """Return these conditions, each with its subject."""
        return [] if self.coordinator() is None else conditions_shown(self.path)

    def ends_of_certificates(self) -> list[tuple[str, float]]:
        """Return the coordinator and its ranks, each with the end of its certificate [s since the epoch]."""
        return self.read(ends_of_processes)

    def presence(self) -> Presence | None:
        """Return the connected clients; without a coordinator there are none. None: not known here."""
        if self.coordinator() is not None:
            return presence_shown(self.path)
        return None if self._is_served() else Presence()

    def members(self) -> list[Member]:
        """Return the clients that were invited or have enrolled."""
        members = self.read(lambda connection: members_in(connection, now=time.time()))
        return [member for member in members if member.identity.role is Role.CLIENT]

    def _is_served(self) -> bool:
        """Return whether a coordinator listens here, or holds the database with a directory on another machine."""
        return self.coordinator() is not None or (not has_state(self.path) and self.is_attended())

    def is_attended(self) -> bool:
        """Return whether a process holds the directory or, if that is on another machine, the database."""
        if has_state(self.path):
            return is_held(self.path)
        return self.read(self._database.has_writer)

    def read(self, work: Callable[[Connection], T]) -> T:
        """Return the result of a read-only `work` in one transaction.

        Raises:
            DatabaseAway: the database server does not answer.
            StateUnusable: the database cannot be opened.
            StoreCorrupted: the database is damaged.
        """
        with self._database.transaction() as connection:
            return work(connection)

    def runs(self) -> list[RunRow]:
        """Return every run, in the order of the queue."""
        with self._database.transaction() as connection:
            return run_rows(connection)

    def run(self, name: str) -> RunRow:
        """Return the run with this id, or else the newest run of this name.

        Raises:
            LookupError: there is no such run; the message names the known ones.
        """
        with self._database.transaction() as connection:
            return _run(connection, name)

    def rounds(self, run_id: RunId, *, most: int | None = None) -> list[RoundRecord]:
        """Return the record of every stored round, or of the newest `most`, the open one last."""
        with self._database.transaction() as connection:
            rows = connection.execute(_of_run(ROUNDS, run_id).order_by(ROUNDS.c.round_id.desc()).limit(most))
            return [*reversed([_record(row) for row in rows]), *_open_round(connection, run_id)]

    def open_round(self, run_id: RunId) -> RoundRecord | None:
        """Return the record of the open round; None: no round is open."""
        with self._database.transaction() as connection:
            return next(iter(_open_round(connection, run_id)), None)

    def summaries(self, run_id: RunId, paging: Paging, most: int | None) -> list[Numbered]:
        """Return the summaries of stored rounds or exchanges from a page's beginning on, in the order of reading.

        Args:
            run_id: the run.
            paging: the page; of its filters only the client counts here, with its fate.
            most: the largest number of rows; None: all.
        """
        number = SUMMARIES.c.round_id
        rows = select(number, SUMMARIES.c.summary).where(SUMMARIES.c.run_id == run_id)
        if paging.client:
            of_client = (PARTICIPATIONS.c.run_id == run_id, PARTICIPATIONS.c.client_id == paging.client)
            fate = (PARTICIPATIONS.c.fate == paging.fate,) if paging.fate else ()
            rows = rows.join(PARTICIPATIONS, PARTICIPATIONS.c.round_id == number).where(*of_client, *fate)
        if paging.after:
            rows = rows.where(number < paging.number if paging.last else number > paging.number)
        rows = rows.order_by(number.desc() if paging.last else number).limit(most)
        return self.read(lambda connection: [(str(at), json.loads(row)) for at, row in connection.execute(rows)])

    def participations(self, run_id: RunId, names: Collection[str] | None = None) -> dict[str, tuple[int, int]]:
        """Return how often each client was invited in the stored rounds, and how many of its updates are in a model.

        Args:
            run_id: the run.
            names: the clients; None: all.
        """
        part = PARTICIPATIONS.c
        columns = (part.client_id, func.sum(part.invited), func.sum(part.used))
        rows = select(*columns).where(part.run_id == run_id).group_by(part.client_id)
        if names is not None:
            rows = rows.where(part.client_id.in_([*names]))
        with self._database.transaction() as connection:
            return {name: (int(invited), int(used)) for name, invited, used in connection.execute(rows)}

    def fates(self, run_id: RunId, most: int) -> dict[int, dict[str, str]]:
        """Return the fates of the clients in the newest stored rounds, by round and client.

        Args:
            run_id: the run.
            most: the largest number of rounds.
        """
        number = ROUNDS.c.round_id
        newest = select(number).where(ROUNDS.c.run_id == run_id).order_by(number.desc()).limit(most)
        part = PARTICIPATIONS.c
        rows = select(part.round_id, part.client_id, part.fate).where(part.run_id == run_id)
        with self._database.transaction() as connection:
            found: dict[int, dict[str, str]] = {at: {} for at in connection.scalars(newest)}
            if not found:
                return found
            for at, client, fate in connection.execute(rows.where(part.round_id >= min(found))):
                found.setdefault(at, {})[client] = fate
        return found

    def members_after(self, run_id: RunId, paging: Paging) -> "MembersBehind | None":
        """Return a reader of the members of a run by pages; None: the last snapshot says too little of them.

        The members are as they were at the end of the last round, which for a run without an open one is now.
        """
        with self._database.transaction() as connection:
            base = read_bare_base(connection, run_id)
            is_current = last_seq(connection, run_id) == base.seq
        if base.faults or not base.num_members or not (is_current or base.num_members > MEMBERS_REPLAYED_MAX):
            return None
        if not self._is_served():
            base.ledger.membership.everyone_disconnected()
        return MembersBehind(self, run_id, base)

    def round(self, run_id: RunId, round_id: RoundId) -> RoundRecord:
        """Return the record of one round.

        Raises:
            LookupError: there is no such round, or its record was deleted.
        """
        with self._database.transaction() as connection:
            row = connection.execute(_of_run(ROUNDS, run_id).where(ROUNDS.c.round_id == round_id)).one_or_none()
            found = [_record(row)] if row else _open_round(connection, run_id)
            if found and found[0].round_id == round_id:
                return found[0]
            number = ROUNDS.c.round_id
            ends = connection.execute(select(func.min(number), func.max(number)).where(ROUNDS.c.run_id == run_id)).one()
            known = [*(end for end in ends if end is not None), *(record.round_id for record in found)]
        raise LookupError(f"run {run_id} has no record of a round {round_id} (known: {_rounds_text(known)})")

    def newest_record(self, run_id: RunId) -> int | None:
        """Return the number of the newest round, or exchange, that has ended; None: there is none."""
        newest = select(func.max(ROUNDS.c.round_id)).where(ROUNDS.c.run_id == run_id)
        with self._database.transaction() as connection:
            found: int | None = connection.scalar(newest)
        return found

    def newest_version(self, run_id: RunId) -> int:
        """Return the version of the current global model; 0: the initial one."""
        newest = select(func.max(VERSIONS.c.version)).where(VERSIONS.c.run_id == run_id)
        return self.read(lambda connection: connection.scalar(newest)) or 0

    def versions(self, run_id: RunId, paging: Paging = ALL, most: int | None = None) -> list[VersionRow]:
        """Return the committed versions, including those whose files were deleted; see `summaries` for pages."""
        number = VERSIONS.c.version
        rows = _of_run(VERSIONS, run_id)
        if paging.after:
            rows = rows.where(number < paging.number if paging.last else number > paging.number)
        rows = rows.order_by(number.desc() if paging.last else number).limit(most)
        with self._database.transaction() as connection:
            return [VersionRow(**row._mapping) for row in connection.execute(rows)]

    def evaluations(self, run_id: RunId, versions: tuple[int, int] | None = None) -> list[EvaluationRow]:
        """Return the evaluations by the server and by the clients: of all versions, or from the first to the second."""
        order = (EVALUATIONS.c.version, EVALUATIONS.c.source)
        whole = _of_run(EVALUATIONS, run_id).where(EVALUATIONS.c.source.in_(WHOLE))
        if versions is not None:
            whole = whole.where(EVALUATIONS.c.version.between(*versions))
        with self._database.transaction() as connection:
            return [evaluation_of(row) for row in connection.execute(whole.order_by(*order))]

    def unmeasured(self, run_id: RunId) -> list[EvaluationRow]:
        """Return the newest evaluations by the server and by the clients that gave not every metric, at most 1,000."""
        detail = EVALUATIONS.c.detail
        gaps = (EVALUATIONS.c.statistics.is_(None), and_(detail != "", detail.contains(LEFT_OUT, autoescape=True)))
        rows = _of_run(EVALUATIONS, run_id).where(EVALUATIONS.c.source.in_(WHOLE), or_(*gaps))
        newest = rows.order_by(EVALUATIONS.c.version.desc(), EVALUATIONS.c.source.desc()).limit(UNMEASURED_MAX)
        with self._database.transaction() as connection:
            return [evaluation_of(row) for row in connection.execute(newest)][::-1]

    def measured(self, run_id: RunId) -> dict[str, list[Measured]]:
        """Return by source the version and the metrics of each evaluation, or the sums before there are metrics.

        The database joins each column to one text of JSON: a tenth of the time of a row each.
        """
        join = "group_concat" if self._database.dialect == "sqlite" else "string_agg"
        sums = "CASE WHEN \"values\" = '{}' THEN '' || statistics ELSE '0' END"  # metrics, if any, are of all sums
        columns = ("'' || version", "'\"' || source || '\"'", sums, '"values"')
        joined = ", ".join(f"{join}({column}, ',')" for column in columns)
        sources = ", ".join(f"'{source}'" for source in sorted(WHOLE))
        query = text(
            f"SELECT {joined} FROM evaluations WHERE run_id = :run AND statistics IS NOT NULL AND source IN ({sources})"
        )
        with self._database.transaction() as connection:
            texts = connection.execute(query, {"run": run_id}).one()
        found: dict[str, list[Measured]] = {}
        versions, of_sources, statistics, metrics = (from_json(f"[{column or ''}]") for column in texts)
        rows = zip(versions, statistics, metrics, strict=True)
        if len(set(of_sources)) == 1:
            return {of_sources[0]: [*rows]}
        for source, row in zip(of_sources, rows, strict=True):
            found.setdefault(source, []).append(row)
        return found

    def has_evaluations(self, run_id: RunId, more_than: int) -> bool:
        """Return whether there are more evaluations by the server and by the clients than a number."""
        of_run = (EVALUATIONS.c.run_id == run_id, EVALUATIONS.c.source.in_(WHOLE))
        query = select(EVALUATIONS.c.version).where(*of_run).limit(1).offset(more_than)
        return self.read(lambda connection: connection.scalar(query)) is not None

    def site_evaluations(self, run_id: RunId, *versions: int) -> list[EvaluationRow]:
        """Return the evaluations and trainings of single sites, by version; only of `versions`, if given."""
        of_sites = _of_run(EVALUATIONS, run_id).where(EVALUATIONS.c.source.notin_(WHOLE))
        if versions:
            of_sites = of_sites.where(EVALUATIONS.c.version.in_(versions))
        with self._database.transaction() as connection:
            rows = connection.execute(of_sites.order_by(EVALUATIONS.c.version, EVALUATIONS.c.source))
            return [evaluation_of(row) for row in rows]

    def settings(self, run_id: RunId) -> list[SettingsChange]:
        """Return the first settings of a run and each change by a resume, in their order; empty: no change."""
        with self._database.transaction() as connection:
            return settings_of(connection, run_id)

    def membership(self, run_id: RunId) -> Membership:
        """Return the clients that have joined the run; without a coordinator they all count as disconnected."""
        with self._database.transaction() as connection:
            membership = _machine(connection, run_id).ledger.membership
        if not self._is_served():
            membership.everyone_disconnected()
        return membership

    def standing(self, run_id: RunId) -> tuple[RunMachine, int]:
        """Return the run's machine and the number of its members; of a run at rest the machine has no members.

        Raises:
            LookupError: there is no such run.
            StoreCorrupted: the journal of the run cannot be replayed.
        """
        with self._database.transaction() as connection:
            if (resting := _resting(connection, run_id)) is not None:
                return resting
        machine = self.machine(run_id)
        return machine, len(machine.ledger.membership.members)

    def machine(self, run_id: RunId) -> RunMachine:
        """Return the run's machine after the last entry of its journal.

        Raises:
            LookupError: there is no such run.
            StoreCorrupted: the journal of the run cannot be replayed.
        """
        with self._database.transaction() as connection:
            return _machine(connection, run_id)


class MembersBehind:
    """Members of a run from its last snapshot, read by pages.

    Args:
        history: the history of the state directory.
        run_id: the run.
        base: the snapshot, without its members.
    """

    def __init__(self, history: History, run_id: RunId, base: BareBase) -> None:
        self._history, self._run_id, self._base = history, run_id, base
        self._walked: dict[ClientId, MemberOfRun] | None = None

    def names(self, paging: Paging) -> Iterator[ClientId]:
        """Yield the names of a page and the ones behind it; no transaction is open between two pages of members."""
        after, self._walked = paging.after, {}
        while some := self._history.read(partial(self._some, after=after, prefix=paging.prefix)):
            self._walked |= some
            yield from some
            *_, after = some

    def _some(self, connection: Connection, after: str, prefix: str) -> dict[ClientId, MemberOfRun]:
        return dict(islice(self._reader(connection).after(after, prefix), PAGE))

    def membership(self, names: Collection[ClientId]) -> Membership:
        """Return the membership of the clients among the names that the run knows; after `names` only of those."""
        members = self._walked
        if members is None:
            members = self._history.read(lambda connection: self._reader(connection).named(names))
        known = {name: members[name] for name in names if name in members}
        return replace(self._base.ledger.membership, members=known)

    def _reader(self, connection: Connection) -> MemberReader:
        return MemberReader(connection, self._run_id, self._base.first, self._base.seq)


def _run(connection: Connection, name: str) -> RunRow:
    rows = run_rows(connection)
    try:
        found = newest_named(name, ((row.run_id, row.name) for row in rows))
    except RunNotNamed as error:
        raise LookupError(str(error)) from None  # exactly this type is reported across processes
    return next(row for row in rows if row.run_id == found)


def _machine(connection: Connection, run_id: RunId) -> RunMachine:
    return recover(connection, run_id).replay(_run(connection, run_id).rules)


def _resting(connection: Connection, run_id: RunId) -> tuple[RunMachine, int] | None:
    """Return the machine of a run that is ended or paused, without its members, and their number; None: it is active.

    After its end nothing happens to a run; a paused one that no client can wake has comings and goings at most.
    """
    base = read_bare_base(connection, run_id)
    ledger = base.ledger
    is_still = ledger.state in TERMINAL or (ledger.state is RunState.PAUSED and not ledger.resumes_itself)
    if base.faults or not is_still or last_seq(connection, run_id) != base.seq:
        return None
    return RunMachine(_run(connection, run_id).rules, ledger), base.num_members or len(ledger.membership.members)


def _open_round(connection: Connection, run_id: RunId) -> list[RoundRecord]:
    if _resting(connection, run_id) is not None:
        return []
    machine = _machine(connection, run_id)
    return [machine.round.record] if machine.round is not None else []


def _rounds_text(known: Sequence[int]) -> str:
    """Return rounds as an operator reads them: `none`, `3` or `1 to 5`."""
    if not known:
        return "none"
    return f"{known[0]} to {known[-1]}" if len(known) > 1 else str(known[0])


def _of_run(table: Table, run_id: RunId) -> Any:
    return select(table).where(table.c.run_id == run_id)


def _record(row: Row[Any]) -> RoundRecord:
    return decode_record(row.record, where=f"run {row.run_id}, round {row.round_id}")
