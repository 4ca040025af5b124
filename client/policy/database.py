"""The file of a site's records, `policy.db`: its schema, its migrations and its transactions.

One SQLite file in the agent's state directory. Every change is durable (synchronous=FULL) before a transaction ends, so
that a counted round stays counted after kill -9, and a promise stays given. `atoll site` writes into the file beside
the running agent, which notices by `PRAGMA data_version`.

It uses `sqlite3` of the standard library, unlike the coordinator's state, which uses SQLAlchemy: this file is never a
PostgreSQL database, has few tables, and an agent should start fast and small. Importing SQLAlchemy would add 0.13 s of
processor time and 10 MB to an agent, whose own imports take 0.6 s and 61 MB (`import atoll.client.process`).
"""

import errno
import logging
import sqlite3
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

logger = logging.getLogger(__name__)

NAME = "policy.db"
SITE_KEY = Path("identity", "site.pem")
"""File of the site key, from the agent's state directory."""
SCHEMA = 6

BUSY_S = 5.0

_RUNS = """
CREATE TABLE runs (run_id TEXT PRIMARY KEY, task TEXT NOT NULL, local TEXT NOT NULL, standing TEXT NOT NULL,
                   asked_at REAL NOT NULL, decided_at REAL, algorithm TEXT NOT NULL, codec TEXT NOT NULL,
                   metrics TEXT NOT NULL, secure TEXT NOT NULL)
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

_PROMISES = """
CREATE TABLE promises (number INTEGER PRIMARY KEY, kind TEXT NOT NULL, run TEXT NOT NULL, purpose TEXT NOT NULL,
                       round INTEGER NOT NULL, attempt INTEGER NOT NULL, session INTEGER NOT NULL, base TEXT NOT NULL,
                       survivors TEXT NOT NULL, hash BLOB NOT NULL,
                       UNIQUE (run, purpose, round, attempt, session, kind)) STRICT;
CREATE TABLE peer_chains (key BLOB NOT NULL, count INTEGER NOT NULL, hash BLOB NOT NULL, PRIMARY KEY (key, count))
                         STRICT, WITHOUT ROWID;
CREATE TABLE forked_peers (key BLOB PRIMARY KEY) STRICT, WITHOUT ROWID;
CREATE TABLE site_key (only INTEGER PRIMARY KEY CHECK (only = 1), key BLOB NOT NULL) STRICT;
"""
"""The promises of this site and the site key to which they belong; the ends of its peers' chains, and the keys of peers
that have shown two chains."""

_BUDGETS = """
CREATE TABLE budgets (number INTEGER PRIMARY KEY, kind TEXT NOT NULL, data TEXT NOT NULL, content TEXT NOT NULL,
                      hash BLOB NOT NULL) STRICT;
"""
"""The entries of the ledger of budgets, a hash chain (`budgets/entries`)."""

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

_FROM_SCHEMA_4 = f"ALTER TABLE runs ADD COLUMN secure TEXT NOT NULL DEFAULT '';\n{_PROMISES}{_BUDGETS}"
"""Migration from schema 4, under which every run was plain."""

_STEPS = {
    0: _RUNS + _ROUNDS + _ROLLBACKS + _PROMISES + _BUDGETS,
    1: f"{_FROM_SCHEMA_1};\n{_FROM_SCHEMA_2};\n{_ROLLBACKS}{_FROM_SCHEMA_4}",
    2: f"{_FROM_SCHEMA_2};\n{_ROLLBACKS}{_FROM_SCHEMA_4}",
    3: f"{_ROLLBACKS}{_FROM_SCHEMA_4}",
    4: _FROM_SCHEMA_4,
    5: _BUDGETS,
}
"""Statements that migrate each schema version to the current one."""


WAY_OUT = (
    "put the state directory back from a newer copy, or move this file away and begin again with `atoll site "
    "accept-rollback --new-key`"
)


class HistoryUnusable(OSError):
    """Error: the file cannot be read or written; the message names it and the cause."""


class PolicyDatabase:
    """The open file, which is created if it is missing.

    Args:
        folder: the agent's state directory.
        may_begin: whether a missing file is made again beside a site key, whose promises were in it.
        read_only: whether it is only read: it must exist, its pages are not checked and its schema stays.

    Raises:
        HistoryUnusable: from every method, when the file cannot be used.
    """

    def __init__(self, folder: Path, *, may_begin: bool = False, read_only: bool = False) -> None:
        self.path = folder / NAME
        if not may_begin and (folder / SITE_KEY).exists() and not self.path.exists():
            raise HistoryUnusable(
                f"{self.path} is missing; the promises and counts of this site were in it: put the state directory "
                "back from a newer copy, or begin again with `atoll site accept-rollback --new-key`"
            )
        uri = f"{self.path.absolute().as_uri()}?mode={'ro' if read_only else 'rwc'}"
        with self.faults():
            self._db = sqlite3.connect(uri, uri=True, timeout=BUSY_S, isolation_level=None, check_same_thread=False)
        try:
            with self.faults():
                version = self._version() if read_only else self._prepared()
            if version < SCHEMA:
                what = f"{self.path} has schema {version}, and this Atoll reads {SCHEMA}"
                raise HistoryUnusable(f"{what}: its agent, or `atoll site list`, brings it to that")
            if version != SCHEMA:
                raise HistoryUnusable(f"{self.path} has schema {version}, this Atoll knows {SCHEMA}: use a newer Atoll")
            if not read_only:
                with self.faults():
                    self._check_pages()
        except BaseException:
            self._db.close()
            raise

    def close(self) -> None:
        """Close the file."""
        self._db.close()

    @property
    def change(self) -> int:
        """Number that changes whenever another process has written to the file."""
        with self.faults():
            return int(self.execute("PRAGMA data_version").fetchone()[0])

    def execute(self, statement: str, values: Iterable[Any] = ()) -> sqlite3.Cursor:
        """Execute one statement, within `faults`."""
        return self._db.execute(statement, tuple(values))

    def execute_each(self, statement: str, rows: Iterable[tuple[Any, ...]]) -> None:
        """Execute one statement for each row of values, within `faults`."""
        self._db.executemany(statement, rows)

    @contextmanager
    def transaction(self) -> Iterator[None]:
        """Execute the block's statements together; they are durable when the block has ended."""
        self._db.execute("BEGIN IMMEDIATE")
        try:
            yield
        except BaseException:
            if self._db.in_transaction:  # SQLite itself rolled back when the disk was full
                self._db.execute("ROLLBACK")
            raise
        self._db.execute("COMMIT")

    @contextmanager
    def faults(self) -> Iterator[None]:
        """Turn the errors of the file, in the block, into HistoryUnusable."""
        try:
            yield
        except (sqlite3.Error, ValueError) as error:  # ValueError: an unknown standing in the file
            code = getattr(error, "sqlite_errorcode", None)
            way_out = f"; {WAY_OUT}" if code in (sqlite3.SQLITE_CORRUPT, sqlite3.SQLITE_NOTADB) else ""
            unusable = HistoryUnusable(f"{self.path} cannot be used: {error}{way_out}")
            if code == sqlite3.SQLITE_FULL:
                unusable.errno = errno.ENOSPC
            raise unusable from error

    def _prepared(self) -> int:
        """Create or migrate the tables, and return the schema version of the file."""
        self._db.execute("PRAGMA journal_mode = WAL")
        self._db.execute("PRAGMA synchronous = FULL")
        with self.transaction():
            version = self._version()
            if version < SCHEMA:
                if version == 1:
                    self._warn_of_approvals()
                for statement in _STEPS[version].split(";\n"):
                    self._db.execute(statement)
                version = SCHEMA
                self._db.execute(f"PRAGMA user_version = {version}")
        return version

    def _version(self) -> int:
        return int(self._db.execute("PRAGMA user_version").fetchone()[0])

    def _check_pages(self) -> None:
        """Check every page and index: damage in a part that is not read now would be found too late, or never."""
        found = self._db.execute("PRAGMA integrity_check(1)").fetchone()[0]
        if found != "ok":
            raise HistoryUnusable(f"{self.path} is damaged: {' '.join(found.split())}; {WAY_OUT}")

    def _warn_of_approvals(self) -> None:
        for (run_id,) in self._db.execute("SELECT run_id FROM runs WHERE standing = 'approved'"):
            fault = "names no algorithm and no codec and must be given again"
            logger.warning("%s: the approval of run %s %s (atoll site approve)", self.path, run_id, fault)
