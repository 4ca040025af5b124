"""What the journal and the records lie in, a file (`sqlite`) or a server (`postgres`): one writer, many readers."""

from abc import ABC, abstractmethod
from collections.abc import Callable
from contextlib import AbstractContextManager
from typing import ClassVar, Literal, TypeVar

from sqlalchemy import Connection

T = TypeVar("T")


class Database(ABC):
    """Transactions that happen wholly or not at all, and are on disk when they have returned."""

    dialect: ClassVar[Literal["sqlite", "postgresql"]]
    restore: ClassVar[str]
    """What to do when it is damaged."""

    name: str
    """What an error calls it."""

    away = ""
    """Why it does not answer now; empty while it does."""

    @abstractmethod
    def transaction(self) -> AbstractContextManager[Connection]:
        """Everything inside is one transaction; a reader sees one instant.

        Raises:
            DiskFull: it was rolled back.
            StoreCorrupted: the database is damaged.
            StateUnusable: it cannot be opened, or not be written.
        """

    def write(self, work: Callable[[Connection], None]) -> None:
        """Do `work` in one transaction, exactly once, however often it is called; raises as `transaction`."""
        with self.transaction() as connection:
            work(connection)

    def read(self, work: Callable[[Connection], T]) -> T:
        """What `work`, which changes nothing, finds in one transaction; raises as `transaction`."""
        with self.transaction() as connection:
            return work(connection)

    @abstractmethod
    def check(self, connection: Connection) -> None:
        """Look for damage, before anything else is done.

        Raises:
            StoreCorrupted: there is some.
        """

    def settle(self, connection: Connection) -> None:  # noqa: B027 - a file is held by a lock beside it
        """The tables are there, and this process is their writer from now on."""

    @abstractmethod
    def close(self) -> None:
        """Let go of it; what was committed is on disk already."""
