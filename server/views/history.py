"""The history of a state directory for the command line: runs, rounds, versions, evaluations, clients.

It only reads the disk and takes no lock, so it works beside a coordinator and after one has crashed. The open round is
in no table: its record comes from a replay of the last snapshot and the journal's entries since.
"""

import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, TypeVar

from sqlalchemy import Connection, Row, Table, func, select

from atoll.protocol.identity.names import Role
from atoll.protocol.notices.book_file import notices_shown
from atoll.protocol.run_names import RunNotNamed, newest_named
from atoll.protocol.vocabulary import RoundId, RunId
from atoll.server.errors import StateUnusable
from atoll.server.identity.register import Member, members_in
from atoll.server.journal.binding import has_state, open_database
from atoll.server.journal.clock_note import ClockNote
from atoll.server.journal.codec import decode_record
from atoll.server.journal.holder import RunningCoordinator, is_held, running_coordinator
from atoll.server.journal.journal import (
    EvaluationRow,
    RunRow,
    SettingsChange,
    VersionRow,
    evaluation_of,
    run_rows,
    settings_of,
)
from atoll.server.journal.recovery import recover
from atoll.server.journal.schema import EVALUATIONS, ROUNDS, VERSIONS, check_version
from atoll.server.journal.sources import WHOLE
from atoll.server.names.places import conflicts_shown
from atoll.server.names.presence import Presence, presence_shown
from atoll.server.rounds.membership import Membership
from atoll.server.rounds.record import RoundRecord
from atoll.server.rounds.run_machine import RunMachine

T = TypeVar("T")


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
            StateTooNew: a later Atoll has written it.
            StoreCorrupted: the database is damaged.
        """
        self.path = path.absolute()
        if not database and not has_state(self.path):
            raise StateUnusable(f"{self.path} is not a state directory: there is no state.db in it")
        self._database = open_database(self.path, database, read_only=True)
        with self._database.transaction() as connection:
            check_version(connection, self.path if self._database.dialect == "sqlite" else self._database.name)

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

    def presence(self) -> Presence | None:
        """Return the connected clients; without a coordinator there are none. None: not known here."""
        return Presence() if self.coordinator() is None else presence_shown(self.path)

    def members(self) -> list[Member]:
        """Return the clients that were invited or have enrolled."""
        members = self.read(lambda connection: members_in(connection, now=time.time()))
        return [member for member in members if member.identity.role is Role.CLIENT]

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

    def rounds(self, run_id: RunId) -> list[RoundRecord]:
        """Return the record of every stored round, the open one last."""
        with self._database.transaction() as connection:
            records = [_record(row) for row in connection.execute(_of_run(ROUNDS, run_id).order_by(ROUNDS.c.round_id))]
            return records + _open_round(connection, run_id)

    def round(self, run_id: RunId, round_id: RoundId) -> RoundRecord:
        """Return the record of one round.

        Raises:
            LookupError: there is no such round, or its record was deleted.
        """
        with self._database.transaction() as connection:
            row = connection.execute(_of_run(ROUNDS, run_id).where(ROUNDS.c.round_id == round_id)).one_or_none()
            found = [_record(row)] if row else _open_round(connection, run_id)
            of_run = select(ROUNDS.c.round_id).where(ROUNDS.c.run_id == run_id).order_by(ROUNDS.c.round_id)
            known = [*connection.scalars(of_run), *(record.round_id for record in found)]
        if not found or found[0].round_id != round_id:
            raise LookupError(f"run {run_id} has no record of a round {round_id} (known: {_rounds_text(known)})")
        return found[0]

    def newest_record(self, run_id: RunId) -> int | None:
        """Return the number of the newest round, or exchange, that has ended; None: there is none."""
        newest = select(func.max(ROUNDS.c.round_id)).where(ROUNDS.c.run_id == run_id)
        with self._database.transaction() as connection:
            found: int | None = connection.scalar(newest)
        return found

    def versions(self, run_id: RunId) -> list[VersionRow]:
        """Return every committed version, including those whose files were deleted."""
        with self._database.transaction() as connection:
            rows = connection.execute(_of_run(VERSIONS, run_id).order_by(VERSIONS.c.version))
            return [VersionRow(**row._mapping) for row in rows]

    def evaluations(self, run_id: RunId) -> list[EvaluationRow]:
        """Return the evaluations of all versions, by the server and by the clients."""
        order = (EVALUATIONS.c.version, EVALUATIONS.c.source)
        with self._database.transaction() as connection:
            whole = _of_run(EVALUATIONS, run_id).where(EVALUATIONS.c.source.in_(WHOLE))
            return [evaluation_of(row) for row in connection.execute(whole.order_by(*order))]

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
        if self.coordinator() is None:
            membership.everyone_disconnected()
        return membership

    def machine(self, run_id: RunId) -> RunMachine:
        """Return the run's machine after the last entry of its journal.

        Raises:
            LookupError: there is no such run.
            StoreCorrupted: its journal cannot be replayed.
        """
        with self._database.transaction() as connection:
            return _machine(connection, run_id)


def _run(connection: Connection, name: str) -> RunRow:
    rows = run_rows(connection)
    try:
        found = newest_named(name, ((row.run_id, row.name) for row in rows))
    except RunNotNamed as error:
        raise LookupError(str(error)) from None  # exactly this type is reported across processes
    return next(row for row in rows if row.run_id == found)


def _machine(connection: Connection, run_id: RunId) -> RunMachine:
    return recover(connection, run_id).replay(_run(connection, run_id).rules)


def _open_round(connection: Connection, run_id: RunId) -> list[RoundRecord]:
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
