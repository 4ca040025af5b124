"""SQLite files that are on disk when a transaction has returned, and failures that have names."""

import sqlite3
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from sqlalchemy import Connection, NullPool, StaticPool, create_engine, event
from sqlalchemy.exc import DBAPIError

from atoll.protocol.durable import DiskFull
from atoll.server.errors import StateUnusable, StoreCorrupted
from atoll.server.journal.database import Database

BUSY_TIMEOUT_S = 10.0
PRAGMAS = (
    "PRAGMA journal_mode = WAL",
    "PRAGMA synchronous = FULL",  # a commit has returned: it is on disk
    "PRAGMA wal_autocheckpoint = 1000",  # pages of 4 KiB, then they are written back into the file
    f"PRAGMA journal_size_limit = {8 << 20}",  # a WAL that one large transaction made longer is cut again
)


class SqliteDatabase(Database):
    """One file: transactions happen wholly or not at all."""

    dialect = "sqlite"
    restore = (
        "put state.db back from a backup (and remove state.db-wal and state.db-shm), or start in another directory"
    )

    def __init__(self, path: Path, *, read_only: bool = False) -> None:
        """Nothing is opened before the first transaction. A writer keeps one connection and may create the file."""
        self.path = path
        self.name = str(path)
        uri = f"{path.absolute().as_uri()}?mode={'ro' if read_only else 'rwc'}"
        pragmas = () if read_only else PRAGMAS

        def connect() -> sqlite3.Connection:
            connection = sqlite3.connect(
                uri, uri=True, timeout=BUSY_TIMEOUT_S, isolation_level=None, check_same_thread=False
            )
            try:
                for pragma in pragmas:
                    connection.execute(pragma)
            except sqlite3.Error:
                connection.close()
                raise
            return connection

        self._lock = threading.Lock()  # a writer has one connection, whatever the thread
        self._engine = create_engine("sqlite://", creator=connect, poolclass=NullPool if read_only else StaticPool)
        begin = "BEGIN" if read_only else "BEGIN IMMEDIATE"
        event.listen(self._engine, "begin", lambda connection: connection.exec_driver_sql(begin))

    @contextmanager
    def transaction(self) -> Iterator[Connection]:
        """Everything inside is one transaction; a reader sees one instant.

        Raises:
            DiskFull: it was rolled back.
            StoreCorrupted: SQLite found damage.
            StateUnusable: the file cannot be opened, or not be written.
        """
        try:
            with self._lock, self._engine.begin() as connection:
                yield connection
        except DBAPIError as error:
            code = getattr(error.orig, "sqlite_errorcode", 0) & 0xFF
            if code == sqlite3.SQLITE_FULL:
                raise DiskFull(f"{self.path}: no room: {error.orig}") from error
            if code in (sqlite3.SQLITE_CORRUPT, sqlite3.SQLITE_NOTADB):
                raise StoreCorrupted(f"{self.path}: damaged: {error.orig}") from error
            if code in (sqlite3.SQLITE_CANTOPEN, sqlite3.SQLITE_READONLY, sqlite3.SQLITE_PERM):
                raise StateUnusable(f"{self.path}: {error.orig}") from error
            raise

    def check(self, connection: Connection) -> None:
        """Look for damage.

        Raises:
            StoreCorrupted: there is some.
        """
        faults = list(connection.exec_driver_sql("PRAGMA quick_check(5)").scalars())
        if faults != ["ok"]:
            raise StoreCorrupted(f"{self.path}: damaged: {'; '.join(faults)}")

    def close(self) -> None:
        """Write the WAL back and let go of the file."""
        with self._lock:
            self._engine.dispose()
