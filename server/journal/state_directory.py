"""The state directory: everything of a coordinator that must survive. One process at a time.

state.db                              the journal, the records, the small updates (SQLite; -wal and -shm beside it)
database.json                         or where else they are: see `binding`
lock                                  held while a coordinator runs; its process id and start time
coordinator.json                      where the coordinator listens
alive                                 when it last lived
runs/<run_id>/versions|updates|incoming   see `store`
"""

import json
import os
import re
from dataclasses import dataclass
from pathlib import Path
from types import TracebackType
from typing import Self

from sqlalchemy import Connection, inspect

from atoll.aggregation.folders import sync_folder
from atoll.protocol.durable import write_atomically
from atoll.protocol.file_lock import Locked, lock_file
from atoll.protocol.vocabulary import RunId
from atoll.server.errors import StateInUse, StateUnusable, StoreCorrupted
from atoll.server.journal import binding, schema
from atoll.server.journal.database import Database

_RUN_ID = re.compile(r"[A-Za-z0-9_][A-Za-z0-9_.-]{0,127}")


class StateDirectory:
    """A directory that this process holds; `open` makes or takes it, `close` lets it go."""

    def __init__(self, path: Path, database: Database, lock: int) -> None:
        self.path, self.database = path, database
        self._lock = lock

    @classmethod
    def open(cls, path: Path, *, create: bool = True, database: str = "") -> Self:
        """Lock the directory and check what is in it.

        Args:
            path: of the directory.
            create: whether it may be made.
            database: the URL of its database; empty: what it had before, and at first a file in it.

        Raises:
            StateInUse: another process holds it, or its database.
            DatabaseAway: the server does not answer.
            StateTooNew: it was written by a later Atoll.
            StateUnusable: it is no directory, cannot be written, or (create=False) does not exist.
            StoreCorrupted: the database is damaged, or missing although there are runs.
            DiskFull: there is no room to make it.
        """
        path = path.absolute()
        if not create and not binding.has_state(path):
            raise StateUnusable(f"{path} is no state directory: there is no state.db in it")
        try:
            path.mkdir(mode=0o700, parents=True, exist_ok=True)
            (path / "runs").mkdir(exist_ok=True)
            lock = lock_directory(path)
        except (FileExistsError, NotADirectoryError) as error:
            raise StateUnusable(f"{path} is not a directory; choose another path for the state") from error
        except StateInUse:
            raise
        except OSError as error:
            raise StateUnusable(f"{path} cannot be written: {error}") from error
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
        """Let the next coordinator in; the directory says when this one last lived."""
        self.database.close()
        (self.path / "coordinator.json").unlink(missing_ok=True)
        os.close(self._lock)

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def run(self, run_id: RunId) -> Path:
        """Where the files of a run lie."""
        return run_folder(self.path, run_id)

    def announce(self, address: str, admin_address: str, pid: int, *, insecure: bool = False) -> None:
        """Tell the command line where this coordinator listens."""
        content = json.dumps({"address": address, "admin_address": admin_address, "pid": pid, "insecure": insecure})
        write_atomically(self.path / "coordinator.json", content.encode())

    def mark_alive(self, now: float) -> None:
        """Note that the coordinator lives [s since the epoch]: in place, so that it needs no room, and no fsync."""
        file = os.open(self.path / "alive", os.O_WRONLY | os.O_CREAT | os.O_CLOEXEC, 0o644)
        try:
            os.pwrite(file, f"{now!r:<32}".encode(), 0)
        finally:
            os.close(file)

    def last_alive(self) -> float | None:
        """What `mark_alive` noted last, also in an earlier process; None when nothing, or nothing legible."""
        try:
            return float((self.path / "alive").read_text())
        except (FileNotFoundError, ValueError):
            return None


def run_folder(path: Path, run_id: RunId) -> Path:
    """Where the files of a run lie in a directory of a coordinator or a rank.

    Raises:
        ValueError: a run id that could be a path to somewhere else, or cannot be a name at all.
    """
    if _RUN_ID.fullmatch(run_id) is None:
        raise ValueError(f"run id {run_id!r} is not 1 to 128 letters, digits, _, . and -, beginning with no . or -")
    return path / "runs" / run_id


@dataclass(frozen=True, slots=True)
class RunningCoordinator:
    """The process that holds a state directory, and where it listens."""

    address: str
    """Of the port for clients."""
    admin_address: str
    pid: int
    is_insecure: bool
    """Whether nobody proves anything there."""


def running_coordinator(path: Path) -> RunningCoordinator | None:
    """Who holds the directory now; None when nobody does, or it does not listen yet. Takes no lock."""
    try:
        said = json.loads((path / "coordinator.json").read_text())
        pid, _, started = (path / "lock").read_text().partition(" ")
    except (FileNotFoundError, NotADirectoryError, ValueError):
        return None
    if not pid.isdecimal() or said["pid"] != int(pid) or _start_time(int(pid)) != started:
        return None
    return RunningCoordinator(said["address"], said["admin_address"], int(pid), said["insecure"])


def is_held(path: Path) -> bool:
    """Whether a process has the directory that may not listen yet. Takes no lock."""
    try:
        pid, _, started = (path / "lock").read_text().partition(" ")
    except (FileNotFoundError, NotADirectoryError):
        return False
    return pid.isdecimal() and _start_time(int(pid)) == started


def lock_directory(path: Path) -> int:
    """Make the directory, which nobody else may enter, and hold it as long as the returned descriptor is open, or the
    process lives. One that is there keeps its mode.

    Raises:
        StateInUse: another process holds it.
        OSError: it cannot be written.
    """
    path.mkdir(mode=0o700, parents=True, exist_ok=True)
    try:
        return lock_file(path / "lock", f"{os.getpid()} {_start_time(os.getpid())}", mode=0o644)
    except Locked as error:
        pid = error.owner.partition(" ")[0] or "unknown"
        raise StateInUse(
            f"{path} is in use by another process ({pid}): stop that one, or choose another state directory"
        ) from error


def _start_time(pid: int) -> str:
    """When a process began [clock ticks since boot]; empty when there is none: ids are reused, this pair is not."""
    try:
        stat = Path(f"/proc/{pid}/stat").read_text()
    except (FileNotFoundError, ProcessLookupError):
        return ""
    return stat.rpartition(")")[2].split()[19]


def _check(database: Database, path: Path) -> str:
    """Find damage, create what is new, migrate what is old; the number by which a database elsewhere knows the path."""
    is_here = database.dialect == "sqlite"
    try:
        with database.transaction() as connection:
            database.check(connection)
            if not inspect(connection).get_table_names():
                _create(connection, path, database.name)
            schema.migrate(connection, path if is_here else database.name)
            number = "" if is_here else binding.bind(connection, path, database.name)
            database.settle(connection)
            return number
    except StoreCorrupted as error:
        num_versions = sum(1 for _ in path.glob("runs/*/versions/*.safetensors"))
        raise StoreCorrupted(
            f"{error}; {database.restore}. The {num_versions} model versions in {path}/runs/*/versions are "
            "safetensors files of their own and can still be read"
        ) from error


def _create(connection: Connection, path: Path, name: str) -> None:
    if any((path / "runs").iterdir()):
        raise StoreCorrupted(f"{name} is missing or empty, but {path}/runs holds the files of runs")
    schema.create(connection)
    write_atomically(path / "alive", b" " * 32)
    sync_folder(path)
    sync_folder(path.parent)
