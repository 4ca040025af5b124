"""The history for a site's policy: the runs that have asked, the rounds that have begun, and accepted rollbacks.

One SQLite file in the agent's state directory. Every change is durable (synchronous=FULL) before the call returns, so
that a counted round stays counted after kill -9. `atoll site` writes into the file beside the running agent, which
notices by `PRAGMA data_version`.

A round has one row for each time that it was counted. The row is open until an update of the round is sent: repeating
the same work continues the open row, so a client that reconnects or restarts is not counted again.

It uses `sqlite3` of the standard library, unlike the coordinator's state, which uses SQLAlchemy: this file is never a
PostgreSQL database, has two tables, and an agent should start fast and small. Importing SQLAlchemy would add 0.13 s of
processor time and 10 MB to an agent, whose own imports take 0.6 s and 61 MB (`import atoll.client.process`).
"""

import errno
import hashlib
import json
import logging
import sqlite3
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from datetime import date, timedelta
from pathlib import Path

from atoll.client.policy.decide import COUNTED, History, Kind, PolicyRequest, Standing

logger = logging.getLogger(__name__)

NAME = "policy.db"
SCHEMA = 4
RUNS_MAX = 1000
"""Number of undecided runs that are remembered; the oldest beyond it are forgotten."""

ROUNDS_DAYS = 31
"""Days for which round counts are kept: a round that is requested later counts as a new one."""

BUSY_S = 5.0

FINGERPRINT_LETTERS = 24
"""Hexadecimal digits of the fingerprint of a run's terms."""

_RUNS = """
CREATE TABLE runs (run_id TEXT PRIMARY KEY, task TEXT NOT NULL, local TEXT NOT NULL, standing TEXT NOT NULL,
                   asked_at REAL NOT NULL, decided_at REAL, algorithm TEXT NOT NULL, codec TEXT NOT NULL,
                   metrics TEXT NOT NULL)
                  STRICT, WITHOUT ROWID;
"""
_ROUNDS = """
CREATE TABLE rounds (run_id TEXT NOT NULL, round_id INTEGER NOT NULL, work TEXT NOT NULL, day TEXT NOT NULL,
                     sent TEXT) STRICT;
CREATE INDEX rounds_by_round ON rounds (run_id, round_id);
CREATE INDEX rounds_by_day ON rounds (day);
"""
_ROLLBACKS = """
CREATE TABLE rollbacks (run_id TEXT PRIMARY KEY, accepted_at REAL NOT NULL) STRICT, WITHOUT ROWID;
"""
"""Rollbacks that the operator has accepted and no agent has used yet."""

_FROM_SCHEMA_1 = f"""
ALTER TABLE runs ADD COLUMN algorithm TEXT NOT NULL DEFAULT '';
ALTER TABLE runs ADD COLUMN codec TEXT NOT NULL DEFAULT '';
UPDATE runs SET standing = 'undecided', decided_at = NULL WHERE standing = 'approved';
ALTER TABLE rounds RENAME TO counted;
DROP INDEX rounds_by_day;
{_ROUNDS}
INSERT INTO rounds SELECT run_id, round_id, '', day, NULL FROM counted;
DROP TABLE counted
"""
"""Migration from schema 1, whose approvals name no algorithm and no codec: they have to be given again."""

_FROM_SCHEMA_2 = "ALTER TABLE runs ADD COLUMN metrics TEXT NOT NULL DEFAULT 'merged'"
"""Migration from schema 2, under which a coordinator showed only sums over all sites."""

_STEPS = {
    0: _RUNS + _ROUNDS + _ROLLBACKS,
    1: f"{_FROM_SCHEMA_1};\n{_FROM_SCHEMA_2};\n{_ROLLBACKS}",
    2: f"{_FROM_SCHEMA_2};\n{_ROLLBACKS}",
    3: _ROLLBACKS,
}
"""Statements that migrate each schema version to the current one."""


class HistoryUnusable(OSError):
    """Error: the file cannot be read or written; the message names it and the cause."""


class NoSuchRun(LookupError):
    """Error: the run has never asked here."""


class OtherTerms(LookupError):
    """Error: the run's terms have changed since the operator looked at them."""


@dataclass(frozen=True, slots=True)
class RunTerms:
    """A run that has asked, and the terms that an approval covers."""

    run_id: str
    task: str
    local: str
    """Settings of the training, JSON."""
    standing: Standing
    asked_at: float
    decided_at: float | None
    algorithm: str
    """Algorithm of the training; empty: the run has only asked for evaluations."""
    codec: str
    """Codec of the updates; empty: plain."""
    metrics: str
    """Form in which the site's metrics leave the site."""

    @property
    def fingerprint(self) -> str:
        """Fingerprint of the terms: a SHA-256 cut to 96 bits, too long to find other terms with the same one."""
        terms = json.dumps([self.task, self.local, self.algorithm, self.codec, self.metrics])
        return hashlib.sha256(terms.encode()).hexdigest()[:FINGERPRINT_LETTERS]


class PolicyHistory:
    """History of one site, an open file that is created if it is missing.

    Args:
        folder: the agent's state directory.

    Raises:
        HistoryUnusable: from every method, when the file cannot be used.
    """

    def __init__(self, folder: Path) -> None:
        self.path, self._day = folder / NAME, ""
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
        """Close the database of the history."""
        self._db.close()

    @property
    def change(self) -> int:
        """Number that changes whenever another process has written to the file."""
        with self._faults():
            return int(self._db.execute("PRAGMA data_version").fetchone()[0])

    # ------------------------------------------------------------ for a decision

    def of(self, request: PolicyRequest, *, day: str) -> History:
        """Return the part of the history that a decision about a request needs, on the given day."""
        with self._faults():
            terms = self._run(request.run_id)
            (today,) = self._db.execute("SELECT count(*) FROM rounds WHERE day = ?", (day,)).fetchone()
            counts = self._counts(request)
        standing = Standing.UNDECIDED if terms is None else terms.standing
        if standing is Standing.APPROVED and not (terms is not None and _covers(terms, request)):
            standing = Standing.UNDECIDED
        is_counted = any(_continues(count, request, day) for count in counts)
        turn = len(counts) + (not is_counted) if request.kind in COUNTED else 0
        fingerprint = "" if terms is None else terms.fingerprint
        return History(standing=standing, rounds_today=today, is_counted=is_counted, turn=turn, terms=fingerprint)

    def asked(self, request: PolicyRequest, at: float) -> bool:
        """Record the terms on which a run asks; return whether the run or its terms are new.

        New terms end an approval; a rejected run stays rejected.

        Args:
            request: a request to train; or to evaluate or for statistics, where algorithm and codec do not matter.
            at: seconds since the epoch.
        """
        run_id, local = request.run_id, request.local or ""
        with self._faults(), self._transaction():
            terms = self._run(run_id)
            if terms is not None and _has_terms(terms, request, local):
                return False
            standing = terms.standing if terms is not None else Standing.UNDECIDED
            if standing is Standing.APPROVED:
                standing = Standing.UNDECIDED
            decided_at = None if terms is None else terms.decided_at
            asked = (request.algorithm or "", request.codec or "", request.metrics)
            row = (run_id, request.task, local, standing, at, decided_at, *asked)
            self._db.execute("INSERT OR REPLACE INTO runs VALUES (?, ?, ?, ?, ?, ?, ?, ?, ?)", row)
            self._db.execute(
                "DELETE FROM runs WHERE run_id IN (SELECT run_id FROM runs WHERE standing = ? ORDER BY asked_at DESC "
                "LIMIT -1 OFFSET ?)",
                (Standing.UNDECIDED, RUNS_MAX),
            )
            return True

    def count(self, request: PolicyRequest, day: str) -> None:
        """Count a training or an upload, unless it continues a counted round.

        An update closes its round: every later training for that round counts.
        """
        with self._faults(), self._transaction():
            self._forget_rounds(day)
            if not any(_continues(count, request, day) for count in self._counts(request)):
                work = "" if request.kind is Kind.UPLOAD else request.content
                row = (request.run_id, request.number, work, day, None)
                self._db.execute("INSERT INTO rounds VALUES (?, ?, ?, ?, ?)", row)
            if request.kind is Kind.UPLOAD:
                self._db.execute(
                    "UPDATE rounds SET sent = ? WHERE run_id = ? AND round_id = ? AND sent IS NULL",
                    (request.content, request.run_id, request.number),
                )

    def task_of(self, run_id: str) -> str:
        """Return the task that a run has asked for; empty if it has never asked."""
        with self._faults():
            terms = self._run(run_id)
        return "" if terms is None else terms.task

    # ------------------------------------------------------------ for the operator

    def runs(self) -> list[RunTerms]:
        """Return all runs that have asked, oldest request first."""
        with self._faults():
            rows = self._db.execute("SELECT * FROM runs ORDER BY asked_at, run_id").fetchall()
        return [_terms(row) for row in rows]

    def decided(self, run_id: str, standing: Standing, at: float, *, fingerprint: str = "") -> RunTerms:
        """Approve or reject a run, on its latest terms.

        Args:
            run_id: id of the run.
            standing: the operator's decision.
            at: seconds since the epoch.
            fingerprint: the fingerprint of the terms that the operator saw; empty: any.

        Raises:
            NoSuchRun: the run has never asked.
            OtherTerms: the run's terms differ from the fingerprint's.
        """
        with self._faults(), self._transaction():
            terms = self._run(run_id)
            if terms is None:
                raise NoSuchRun(run_id)
            if fingerprint not in ("", terms.fingerprint):
                raise OtherTerms(run_id)
            change = "UPDATE runs SET standing = ?, decided_at = ? WHERE run_id = ?"
            self._db.execute(change, (standing, at, run_id))
            return replace(terms, standing=standing, decided_at=at)

    def forget(self, run_id: str) -> None:
        """Forget a run, so that its next request counts as its first; its rounds remain counted.

        Raises:
            NoSuchRun: the run has never asked.
        """
        with self._faults(), self._transaction():
            if self._db.execute("DELETE FROM runs WHERE run_id = ?", (run_id,)).rowcount == 0:
                raise NoSuchRun(run_id)

    def accept_rollback(self, run_id: str, at: float) -> None:
        """Ask the running agent to accept a rollback of a run."""
        with self._faults():
            self._db.execute("INSERT OR REPLACE INTO rollbacks VALUES (?, ?)", (run_id, at))

    def accepted_rollbacks(self) -> list[str]:
        """Return the runs whose rollback the operator accepts and no agent has used."""
        with self._faults():
            return [run_id for (run_id,) in self._db.execute("SELECT run_id FROM rollbacks ORDER BY run_id")]

    def taken(self, run_id: str) -> None:
        """Record that the agent has used an accepted rollback."""
        with self._faults():
            self._db.execute("DELETE FROM rollbacks WHERE run_id = ?", (run_id,))

    # ------------------------------------------------------------ the file

    def _forget_rounds(self, day: str) -> None:
        """Delete the rows of long past days, once a day."""
        if day != self._day:
            oldest = date.fromisoformat(day) - timedelta(days=ROUNDS_DAYS)
            self._db.execute("DELETE FROM rounds WHERE day < ?", (oldest.isoformat(),))
            self._day = day

    def _counts(self, request: PolicyRequest) -> list["_Count"]:
        """Return the stored rows of a request's round, one for each time that the policy's limit counted the round."""
        if request.kind not in COUNTED:
            return []
        query = "SELECT work, day, sent FROM rounds WHERE run_id = ? AND round_id = ?"
        return [_Count(*row) for row in self._db.execute(query, (request.run_id, request.number))]

    def _prepared(self) -> int:
        """Create or migrate the tables, and return the schema version of the file."""
        self._db.execute("PRAGMA journal_mode = WAL")
        self._db.execute("PRAGMA synchronous = FULL")
        with self._transaction():
            (version,) = self._db.execute("PRAGMA user_version").fetchone()
            if version < SCHEMA:
                if version == 1:
                    self._warn_of_approvals()
                for statement in _STEPS[version].split(";\n"):
                    self._db.execute(statement)
                version = SCHEMA
                self._db.execute(f"PRAGMA user_version = {version}")
        return int(version)

    def _warn_of_approvals(self) -> None:
        for (run_id,) in self._db.execute("SELECT run_id FROM runs WHERE standing = 'approved'"):
            fault = "names no algorithm and no codec and must be given again"
            logger.warning("%s: the approval of run %s %s (atoll site approve)", self.path, run_id, fault)

    def _run(self, run_id: str) -> RunTerms | None:
        row = self._db.execute("SELECT * FROM runs WHERE run_id = ?", (run_id,)).fetchone()
        return None if row is None else _terms(row)

    @contextmanager
    def _transaction(self) -> Iterator[None]:
        self._db.execute("BEGIN IMMEDIATE")
        try:
            yield
        except BaseException:
            if self._db.in_transaction:  # SQLite itself rolled back when the disk was full
                self._db.execute("ROLLBACK")
            raise
        self._db.execute("COMMIT")

    @contextmanager
    def _faults(self) -> Iterator[None]:
        try:
            yield
        except (sqlite3.Error, ValueError) as error:  # ValueError: an unknown standing in the file
            unusable = HistoryUnusable(f"{self.path} cannot be used: {error}")
            if getattr(error, "sqlite_errorcode", None) == sqlite3.SQLITE_FULL:
                unusable.errno = errno.ENOSPC
            raise unusable from error


@dataclass(frozen=True, slots=True)
class _Count:
    """Row of `rounds`: one counted beginning of a round."""

    work: str
    """Content of the training; empty: the round was counted with its update, or by an older Atoll."""
    day: str
    sent: str | None
    """Digest of the update that may be sent; None: the row is open."""


def _continues(count: _Count, request: PolicyRequest, day: str) -> bool:
    """Return whether a request continues the round of this row."""
    if request.kind is Kind.UPLOAD:
        return count.sent in (None, request.content)
    return count.sent is None and (count.work, count.day) == (request.content, day)


def _covers(terms: RunTerms, request: PolicyRequest) -> bool:
    """Return whether an approval of these terms covers a request; an upload is covered if its training was."""
    return _has_terms(terms, request, terms.local if request.local is None else request.local)


def _has_terms(terms: RunTerms, request: PolicyRequest, local: str) -> bool:
    if (terms.task, terms.local) != (request.task, local):
        return False
    if request.kind is Kind.UPLOAD:
        return True
    algorithm, codec = request.algorithm, request.codec or ""
    return terms.metrics == request.metrics and (
        algorithm is None or (terms.algorithm, terms.codec) == (algorithm, codec)
    )


def _terms(row: tuple[str, str, str, str, float, float | None, str, str, str]) -> RunTerms:
    run_id, task, local, standing, asked_at, decided_at, *terms = row
    return RunTerms(run_id, task, local, Standing(standing), asked_at, decided_at, *terms)
