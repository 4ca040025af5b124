"""The database of the journal and the records, a file (`sqlite`) or a server (`postgres`): one writer, many readers."""

from abc import ABC, abstractmethod
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from typing import ClassVar, Literal, TypeVar

from sqlalchemy import Connection

T = TypeVar("T")


class Database(ABC):
    """Database with atomic transactions that are durable when they return."""

    dialect: ClassVar[Literal["sqlite", "postgresql"]]
    restore: ClassVar[str]
    """Advice to the operator of a damaged database."""

    name: str
    """Name of the database in messages."""

    away = ""
    """Reason why the database does not respond now; empty: it responds."""

    @abstractmethod
    def transaction(self) -> AbstractContextManager[Connection]:
        """Return a context whose content is one transaction; a reader sees the state of one instant.

        Raises:
            DiskFull: the transaction was rolled back.
            StoreCorrupted: the database is damaged.
            StateUnusable: the database cannot be opened or written.
        """

    def write(self, work: Callable[[Connection], None]) -> None:
        """Apply `work` in one transaction exactly once, although it may be called again; raises as `transaction`."""
        with self.transaction() as connection:
            work(connection)

    def read(self, work: Callable[[Connection], T]) -> T:
        """Return the result of a read-only `work` in one transaction; raises the errors of `transaction`."""
        with self.transaction() as connection:
            return work(connection)

    @abstractmethod
    def check(self, connection: Connection) -> None:
        """Check the database for damage, before any other use.

        Raises:
            StoreCorrupted: the database is damaged.
        """

    def has_writer(self, connection: Connection) -> bool:
        """Return whether a process holds the database for writing, as far as the database itself knows."""
        return False

    def settle(self, connection: Connection) -> None:  # noqa: B027 - a file is protected by a lock file beside it
        """Make this process the only writer, once the tables exist."""

    def overwrite(self, connection: Connection) -> AbstractContextManager[None]:
        """Return a context within a transaction in which what is deleted or replaced leaves no trace in the files."""
        return nullcontext()

    def shed(self) -> None:  # noqa: B027 - the log of a server is its operator's
        """Drop what the write-ahead log still has of earlier contents."""

    @abstractmethod
    def close(self) -> None:
        """Close the database; all commits are on disk already."""
