"""An SQLite file as the journal's database: durable transactions, and named errors."""

import sqlite3
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from sqlalchemy import Connection, NullPool, StaticPool, create_engine, event
from sqlalchemy.exc import DBAPIError

from atoll.ground.durable import DiskFull
from atoll.server.errors import StateUnusable, StoreCorrupted
from atoll.server.journal.database import Database

BUSY_TIMEOUT_S = 10.0
SHED_BUSY_MS = 50
PRAGMAS = (
    "PRAGMA journal_mode = WAL",
    "PRAGMA synchronous = FULL",  # a commit is on disk when it returns
    "PRAGMA wal_autocheckpoint = 1000",  # pages of 4 KiB in the WAL before they are copied into the file
    f"PRAGMA journal_size_limit = {8 << 20}",  # truncates a WAL that a large transaction has extended
)


class SqliteDatabase(Database):
    """Database in one file, with its write-ahead log beside it."""

    dialect = "sqlite"
    restore = (
        "put state.db back from a backup (and remove state.db-wal and state.db-shm), or start in another directory"
    )

    def __init__(self, path: Path, *, read_only: bool = False) -> None:
        """Prepare the database; the first transaction opens the file, which a writer may create."""
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

        self._lock = threading.Lock()  # all threads of a writer share one connection
        self._engine = create_engine("sqlite://", creator=connect, poolclass=NullPool if read_only else StaticPool)
        begin = "BEGIN" if read_only else "BEGIN IMMEDIATE"
        event.listen(self._engine, "begin", lambda connection: connection.exec_driver_sql(begin))

    @contextmanager
    def transaction(self) -> Iterator[Connection]:
        """Run the content of the context as one transaction; a reader sees the state of one instant.

        Raises:
            DiskFull: the transaction was rolled back.
            StoreCorrupted: SQLite found damage.
            StateUnusable: the file cannot be opened or written.
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
            if code in (sqlite3.SQLITE_CANTOPEN, sqlite3.SQLITE_READONLY, sqlite3.SQLITE_PERM, sqlite3.SQLITE_IOERR):
                raise StateUnusable(f"{self.path}: {error.orig}") from error
            raise

    def check(self, connection: Connection) -> None:
        """Check the file for damage.

        Raises:
            StoreCorrupted: the file is damaged.
        """
        faults = list(connection.exec_driver_sql("PRAGMA quick_check(5)").scalars())
        if faults != ["ok"]:
            raise StoreCorrupted(f"{self.path}: damaged: {'; '.join(faults)}")

    @contextmanager
    def overwrite(self, connection: Connection) -> Iterator[None]:
        """Write zeros over what is deleted or replaced; else it would stay in free pages until they are used again."""
        connection.exec_driver_sql("PRAGMA secure_delete = ON")
        try:
            yield
        finally:
            connection.exec_driver_sql("PRAGMA secure_delete = OFF")

    def shed(self) -> None:
        """Copy the write-ahead log into the file and empty it; while a reader needs it, at the next call."""
        with self._lock:
            pooled = self._engine.raw_connection()
            connection = pooled.driver_connection
            assert connection is not None
            try:
                connection.execute(f"PRAGMA busy_timeout = {SHED_BUSY_MS}")
                connection.execute("PRAGMA wal_checkpoint(TRUNCATE)")
            except sqlite3.OperationalError:  # a full disk: the copy is made later
                pass
            finally:
                connection.execute(f"PRAGMA busy_timeout = {int(BUSY_TIMEOUT_S * 1000)}")
                pooled.close()

    def close(self) -> None:
        """Copy the write-ahead log into the file and close it."""
        with self._lock:
            self._engine.dispose()
