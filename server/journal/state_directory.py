"""The state directory: all state of a coordinator that must survive a restart. One process at a time holds it.

state.db                              the journal, the records, the small updates (SQLite; -wal and -shm beside it)
database.json                         instead of state.db: the database of a server, see `binding`
lock                                  locked while a coordinator runs; its process id and start time
coordinator.json                      the addresses of the coordinator
alive                                 the last time at which it was known to run
clock.json                            the true clock at that time, see `journal/clock_note`
conflicts.json                        the names that two processes use now, see `names/places`
presence.json                         the clients connected now, and arriving updates, see `names/presence`
notices.json                          sent notices and persisting conditions, see `protocol/notices/teller`
statistics/<number>.json              statistics of the sites' data, see `server/statistics/results`
runs/<run_id>/versions|updates|incoming   see `run_store`
"""

import json
import os
from pathlib import Path
from types import TracebackType
from typing import Self

from sqlalchemy import Connection, inspect

from atoll.ground.durable import write_atomically
from atoll.ground.folders import sync_folder
from atoll.protocol.vocabulary import RunId
from atoll.server.errors import StateInUse, StateUnusable, StoreCorrupted
from atoll.server.journal import binding, schema
from atoll.server.journal.database import Database
from atoll.server.journal.holder import lock_directory, run_folder


class StateDirectory:
    """State directory that this process holds, from `open` to `close`."""

    def __init__(self, path: Path, database: Database, lock: int) -> None:
        self.path, self.database = path, database
        self._lock = lock

    @classmethod
    def open(cls, path: Path, *, create: bool = True, database: str = "") -> Self:
        """Lock the directory and check its content.

        Args:
            path: the path of the directory.
            create: whether it may be created.
            database: the URL of its database; empty: the last used one, initially a file in the directory.

        Raises:
            StateInUse: another process holds the directory, or its database.
            DatabaseAway: the database server does not answer.
            StateTooNew: a later Atoll has written the directory.
            StateUnusable: the path is not a directory, cannot be written, or (create=False) does not exist.
            StoreCorrupted: the database is damaged, or missing although there are runs.
            DiskFull: the disk has no room to create it.
        """
        path = path.absolute()
        if not create and not binding.has_state(path):
            raise StateUnusable(f"{path} is not a state directory: there is no state.db in it")
        try:
            path.mkdir(mode=0o700, parents=True, exist_ok=True)
            (path / "runs").mkdir(exist_ok=True)
            lock = lock_directory(path)
        except (FileExistsError, NotADirectoryError) as error:
            raise StateUnusable(f"{path} is not a directory; choose another path for the state") from error
        except StateInUse:
            raise
        except OSError as error:
            raise StateUnusable(
                f"{path} cannot be written: {str(error.strerror).lower()}: name another path"
            ) from error
        opened = None
        try:
            opened = binding.open_database(path, database)
            if number := _check(opened, path):
                binding.note(path, binding.Binding(database or opened.name, number))
        except BaseException:
            if opened is not None:
                opened.close()
            os.close(lock)
            raise
        return cls(path, opened, lock)

    def close(self) -> None:
        """Release the directory for the next coordinator."""
        self.database.close()
        (self.path / "coordinator.json").unlink(missing_ok=True)
        os.ftruncate(self._lock, 0)  # or this process, if it continues, would count as the holder
        os.close(self._lock)

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def run(self, run_id: RunId) -> Path:
        """Return the folder of a run's files."""
        return run_folder(self.path, run_id)

    def announce(self, address: str, admin_address: str, pid: int, *, insecure: bool = False) -> None:
        """Publish the addresses of this coordinator for the command line."""
        content = json.dumps({"address": address, "admin_address": admin_address, "pid": pid, "insecure": insecure})
        write_atomically(self.path / "coordinator.json", content.encode())

    def mark_alive(self, now: float) -> None:
        """Record that the coordinator is alive at `now` [s since the epoch].

        The file is overwritten in place, so that this needs no disk space, and not synced.
        """
        file = os.open(self.path / "alive", os.O_WRONLY | os.O_CREAT | os.O_CLOEXEC, 0o644)
        try:
            os.pwrite(file, f"{now!r:<32}".encode(), 0)
        finally:
            os.close(file)

    def last_alive(self) -> float | None:
        """Return the last time of `mark_alive`, in this process or an earlier one; None: missing or unreadable."""
        try:
            return float((self.path / "alive").read_text())
        except (FileNotFoundError, ValueError):
            return None


def _check(database: Database, path: Path) -> str:
    """Check the database for damage, create or migrate its tables, and bind it to the directory.

    Returns:
        The number that a server's database and the directory share; empty for a file in the directory.
    """
    is_here = database.dialect == "sqlite"
    try:
        with database.transaction() as connection:
            database.check(connection)
            if not inspect(connection).get_table_names():
                _create(connection, path, database.name)
            where = path if is_here else database.name
            if schema.check_version(connection, where) < schema.SCHEMA_VERSION:
                from atoll.server.journal.migrations import migrate  # which reads all that a journal has

                migrate(connection, where)
            number = "" if is_here else binding.bind(connection, path, database.name)
            database.settle(connection)
            return number
    except StoreCorrupted as error:
        num_versions = sum(1 for _ in path.glob("runs/*/versions/*.safetensors"))
        raise StoreCorrupted(
            f"{error}; {database.restore}. Model versions in {path}/runs/*/versions "
            f"({num_versions}) are separate safetensors files and can still be read"
        ) from error


def _create(connection: Connection, path: Path, name: str) -> None:
    if any((path / "runs").iterdir()):
        raise StoreCorrupted(f"{name} is missing or empty, but {path}/runs holds the files of runs")
    schema.create(connection)
    write_atomically(path / "alive", b" " * 32)
    sync_folder(path)
    sync_folder(path.parent)
