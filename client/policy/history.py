"""What a site remembers for its policy: the runs that have asked, and the rounds that were begun.

One SQLite file in the agent's state directory. Every change is durable (synchronous=FULL) before the call returns, so
that what was counted stays counted after kill -9; `atoll site` writes into it beside the running agent, which notices.
"""

import sqlite3
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

from atoll.client.policy.decide import History, PolicyRequest, Standing

NAME = "policy.db"
SCHEMA = 1
RUNS_MAX = 1000
"""Runs that are remembered; beyond it those that nobody has decided about are forgotten, the oldest first."""

BUSY_S = 5.0

_TABLES = """
CREATE TABLE runs (run_id TEXT PRIMARY KEY, task TEXT NOT NULL, local TEXT NOT NULL, standing TEXT NOT NULL,
                   asked_at REAL NOT NULL, decided_at REAL) STRICT, WITHOUT ROWID;
CREATE TABLE rounds (run_id TEXT, round_id INTEGER, day TEXT NOT NULL, PRIMARY KEY (run_id, round_id)) STRICT;
CREATE INDEX rounds_by_day ON rounds (day);
"""


class HistoryUnusable(OSError):
    """The file cannot be read or written; the text says which and why."""


class NoSuchRun(LookupError):
    """The run has never asked here."""


@dataclass(frozen=True, slots=True)
class RunTerms:
    """One run that has asked, with what an approval is bound to."""

    run_id: str
    task: str
    local: str
    """JSON: the settings of the training that the run asked with."""
    standing: Standing
    asked_at: float
    decided_at: float | None


class PolicyHistory:
    """Opens the file, and makes it when it is not there.

    Raises:
        HistoryUnusable: from every method, when the file cannot be used.
    """

    def __init__(self, folder: Path) -> None:
        self.path = folder / NAME
        with self._faults():
            self._db = sqlite3.connect(self.path, timeout=BUSY_S, isolation_level=None, check_same_thread=False)
        try:
            with self._faults():
                version = self._prepared()
            if version != SCHEMA:
                raise HistoryUnusable(f"{self.path} has schema {version}, this Atoll knows {SCHEMA}: use a newer Atoll")
        except BaseException:
            self._db.close()
            raise

    def close(self) -> None:
        """Let go of the file."""
        self._db.close()

    @property
    def change(self) -> int:
        """A number that is another one when another process has written."""
        with self._faults():
            return int(self._db.execute("PRAGMA data_version").fetchone()[0])

    # ------------------------------------------------------------ for a decision

    def of(self, request: PolicyRequest, *, local: str | None, day: str) -> History:
        """What matters for a request.

        Args:
            request: what is wanted.
            local: the settings that it is wanted with; None: those that the run has asked with.
            day: of the decision.
        """
        with self._faults():
            terms = self._run(request.run_id)
            (today,) = self._db.execute("SELECT count(*) FROM rounds WHERE day = ?", (day,)).fetchone()
            counted = self._db.execute(
                "SELECT 1 FROM rounds WHERE run_id = ? AND round_id = ?", (request.run_id, request.number)
            ).fetchone()
        standing = Standing.UNDECIDED if terms is None else terms.standing
        is_same = terms is not None and request.task == terms.task and local in (None, terms.local)
        if standing is Standing.APPROVED and not is_same:
            standing = Standing.UNDECIDED
        return History(standing=standing, rounds_today=today, is_counted=counted is not None)

    def asked(self, run_id: str, task: str, local: str, at: float) -> bool:
        """Remember that a run asks on these terms; True when it is new, or they are. What was rejected stays so."""
        with self._faults(), self._transaction():
            terms = self._run(run_id)
            if terms is not None and (terms.task, terms.local) == (task, local):
                return False
            standing = terms.standing if terms is not None else Standing.UNDECIDED
            if standing is Standing.APPROVED:
                standing = Standing.UNDECIDED
            row = (run_id, task, local, standing, at, None if terms is None else terms.decided_at)
            self._db.execute("INSERT OR REPLACE INTO runs VALUES (?, ?, ?, ?, ?, ?)", row)
            self._db.execute(
                "DELETE FROM runs WHERE run_id IN (SELECT run_id FROM runs WHERE standing = ? ORDER BY asked_at DESC "
                "LIMIT -1 OFFSET ?)",
                (Standing.UNDECIDED, RUNS_MAX),
            )
            return True

    def begun(self, run_id: str, round_id: int, day: str) -> None:
        """Count a round, once."""
        with self._faults(), self._transaction():
            self._db.execute("INSERT OR IGNORE INTO rounds VALUES (?, ?, ?)", (run_id, round_id, day))

    def task_of(self, run_id: str) -> str:
        """The task that a run has asked for; empty when it never asked."""
        with self._faults():
            terms = self._run(run_id)
        return "" if terms is None else terms.task

    # ------------------------------------------------------------ for the operator

    def runs(self) -> list[RunTerms]:
        """All runs that have asked, those that asked first at the top."""
        with self._faults():
            rows = self._db.execute("SELECT * FROM runs ORDER BY asked_at, run_id").fetchall()
        return [_terms(row) for row in rows]

    def decided(self, run_id: str, standing: Standing, at: float) -> RunTerms:
        """Approve or reject a run, on the terms on which it asked last.

        Raises:
            NoSuchRun: it has never asked.
        """
        with self._faults(), self._transaction():
            change = "UPDATE runs SET standing = ?, decided_at = ? WHERE run_id = ?"
            self._db.execute(change, (standing, at, run_id))
            terms = self._run(run_id)
        if terms is None:
            raise NoSuchRun(run_id)
        return terms

    def forget(self, run_id: str) -> None:
        """The run's next question is its first. The rounds that were begun for it stay counted.

        Raises:
            NoSuchRun: it has never asked.
        """
        with self._faults(), self._transaction():
            if self._db.execute("DELETE FROM runs WHERE run_id = ?", (run_id,)).rowcount == 0:
                raise NoSuchRun(run_id)

    # ------------------------------------------------------------ the file

    def _prepared(self) -> int:
        """The schema of the file, in which there are tables now."""
        self._db.execute("PRAGMA journal_mode = WAL")
        self._db.execute("PRAGMA synchronous = FULL")
        with self._transaction():
            (version,) = self._db.execute("PRAGMA user_version").fetchone()
            if version == 0:
                for statement in _TABLES.split(";\n"):
                    self._db.execute(statement)
                self._db.execute(f"PRAGMA user_version = {SCHEMA}")
        return int(version) or SCHEMA

    def _run(self, run_id: str) -> RunTerms | None:
        row = self._db.execute("SELECT * FROM runs WHERE run_id = ?", (run_id,)).fetchone()
        return None if row is None else _terms(row)

    @contextmanager
    def _transaction(self) -> Iterator[None]:
        self._db.execute("BEGIN IMMEDIATE")
        try:
            yield
        except BaseException:
            self._db.execute("ROLLBACK")
            raise
        self._db.execute("COMMIT")

    @contextmanager
    def _faults(self) -> Iterator[None]:
        try:
            yield
        except (sqlite3.Error, ValueError) as error:  # ValueError: a standing that no Atoll has written
            raise HistoryUnusable(f"{self.path} cannot be used: {error}") from error


def _terms(row: tuple[str, str, str, str, float, float | None]) -> RunTerms:
    run_id, task, local, standing, asked_at, decided_at = row
    return RunTerms(run_id, task, local, Standing(standing), asked_at, decided_at)
