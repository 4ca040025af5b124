"""The state directory: everything of a coordinator that must survive. One process at a time.

state.db                              the journal, the records, the small updates (SQLite; -wal and -shm beside it)
lock                                  held while a coordinator runs; its process id and start time
coordinator.json                      where the coordinator listens
alive                                 when it last lived
runs/<run_id>/versions|updates|incoming   see `store`
"""

import fcntl
import json
import os
import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from types import TracebackType
from typing import Any, Self

from sqlalchemy import (
    JSON,
    Column,
    Connection,
    Float,
    Integer,
    LargeBinary,
    MetaData,
    Table,
    Text,
    inspect,
    select,
)

from atoll.aggregation.tensorfile import sync_folder
from atoll.protocol.vocabulary import RunId
from atoll.server.codec import StoreCorrupted
from atoll.server.database import Database, StateUnusable
from atoll.server.durable import write_atomically

SCHEMA_VERSION = 3

_RUN_ID = re.compile(r"[A-Za-z0-9_][A-Za-z0-9_.-]{0,127}")


class StateInUse(OSError):
    """Another coordinator has the directory."""


class StateTooNew(OSError):
    """A later Atoll has written the directory."""


# ---------------------------------------------------------------- the schema

metadata = MetaData()


def _table(name: str, keys: Mapping[str, Any], columns: Mapping[str, Any], **options: Any) -> Table:
    return Table(
        name,
        metadata,
        *(Column(key, kind, primary_key=True) for key, kind in keys.items()),
        *(Column(column, kind, nullable=column in _NULLABLE) for column, kind in columns.items()),
        **options,
    )


_NULLABLE = frozenset({"ended_at", "version", "statistics", "data"})
_RUN, _SEQ, _VERSION = {"run_id": Text}, {"run_id": Text, "seq": Integer}, {"run_id": Text, "version": Integer}
_WHAT = {"name": Text, "task": Text, "config": Text, "rules": Text, "created_at": Float, "order": Integer}
_SUMS = JSON(none_as_null=True)

META = _table("meta", {"key": Text}, {"value": Text})
RUNS = _table("runs", _RUN, {**_WHAT, "state": Text, "cause": Text, "ended_at": Float})
_ENTRY = {"at": Float, "kind": Text, "body": Text, "checksum": Integer}
JOURNAL = _table("journal", _SEQ, _ENTRY, sqlite_with_rowid=False)
_MEMBERS_OF = {"first": Integer, "num_members": Integer}  # 0: they are in the body, as schema 2 had it
SNAPSHOTS = _table("snapshots", _SEQ, {"at": Float, "body": Text, "checksum": Integer, **_MEMBERS_OF})
MEMBERS = _table("members", {**_SEQ, "page": Integer}, {"body": Text, "checksum": Integer})
ROUNDS = _table("rounds", {**_RUN, "round_id": Integer}, {"phase": Text, "version": Integer, "record": Text})
VERSIONS = _table("versions", _VERSION, {"digest": Text, "num_bytes": Integer, "created_at": Float})
_MEASURE = {"statistics": _SUMS, "values": JSON, "num_clients": Integer, "detail": Text, "at": Float}
UPDATES = _table("updates", {**_RUN, "digest": Text}, {"meta": Text, "data": LargeBinary})
EVALUATIONS = _table("evaluations", {**_VERSION, "source": Text}, _MEASURE)


def _put_members_on_pages(connection: Connection) -> None:
    MEMBERS.create(connection)
    for column in _MEMBERS_OF:
        connection.exec_driver_sql(f"ALTER TABLE snapshots ADD COLUMN {column} INTEGER NOT NULL DEFAULT 0")


MIGRATIONS: Mapping[int, Callable[[Connection], None]] = {
    1: lambda connection: UPDATES.create(connection),  # a round that was open then is abandoned, and tried again
    2: _put_members_on_pages,
}
"""What leads from a schema version to the next one."""


def check_version(connection: Connection, path: Path) -> int:
    """The schema version of an open database.

    Raises:
        StateTooNew: it is newer than this Atoll knows.
        StoreCorrupted: it says none.
    """
    names = inspect(connection).get_table_names()
    value = connection.scalar(select(META.c.value).where(META.c.key == "schema_version")) if "meta" in names else None
    if value is None or not value.isdecimal():
        raise StoreCorrupted(f"{path}: no database of Atoll: it names no schema version")
    if int(value) > SCHEMA_VERSION:
        raise StateTooNew(
            f"{path} has schema version {value}, this Atoll knows up to {SCHEMA_VERSION}: use the Atoll that wrote "
            "it or a later one, or choose another state directory"
        )
    return int(value)


# ---------------------------------------------------------------- the directory


class StateDirectory:
    """A directory that this process holds; `open` makes or takes it, `close` lets it go."""

    def __init__(self, path: Path, database: Database, lock: int) -> None:
        self.path, self.database = path, database
        self._lock = lock

    @classmethod
    def open(cls, path: Path, *, create: bool = True) -> Self:
        """Lock the directory and check what is in it.

        Raises:
            StateInUse: another process holds it.
            StateTooNew: it was written by a later Atoll.
            StateUnusable: it is no directory, cannot be written, or (create=False) does not exist.
            StoreCorrupted: the database is damaged, or missing although there are runs.
            DiskFull: there is no room to make it.
        """
        path = path.absolute()
        if not create and not (path / "state.db").is_file():
            raise StateUnusable(f"{path} is no state directory: there is no state.db in it")
        try:
            (path / "runs").mkdir(parents=True, exist_ok=True)
            lock = lock_directory(path)
        except (FileExistsError, NotADirectoryError) as error:
            raise StateUnusable(f"{path} is not a directory; choose another path for the state") from error
        except StateInUse:
            raise
        except OSError as error:
            raise StateUnusable(f"{path} cannot be written: {error}") from error
        database = Database(path / "state.db")
        try:
            _check(database, path)
        except BaseException:
            database.close()
            os.close(lock)
            raise
        return cls(path, database, lock)

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

    def announce(self, address: str, admin_address: str, pid: int) -> None:
        """Tell the command line where this coordinator listens."""
        content = json.dumps({"address": address, "admin_address": admin_address, "pid": pid})
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


def running_coordinator(path: Path) -> RunningCoordinator | None:
    """Who holds the directory now; None when nobody does, or it does not listen yet. Takes no lock."""
    try:
        said = json.loads((path / "coordinator.json").read_text())
        pid, _, started = (path / "lock").read_text().partition(" ")
    except (FileNotFoundError, NotADirectoryError, ValueError):
        return None
    if not pid.isdecimal() or said["pid"] != int(pid) or _start_time(int(pid)) != started:
        return None
    return RunningCoordinator(said["address"], said["admin_address"], int(pid))


def lock_directory(path: Path) -> int:
    """Make the directory, and hold it as long as the returned descriptor is open, or the process lives.

    Raises:
        StateInUse: another process holds it.
        OSError: it cannot be written.
    """
    path.mkdir(parents=True, exist_ok=True)
    lock = os.open(path / "lock", os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o644)
    try:
        fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError as error:
        pid = os.pread(lock, 64, 0).decode().partition(" ")[0] or "unknown"
        os.close(lock)
        raise StateInUse(
            f"{path} is in use by another process ({pid}): stop that one, or choose another state directory"
        ) from error
    os.ftruncate(lock, 0)
    os.pwrite(lock, f"{os.getpid()} {_start_time(os.getpid())}".encode(), 0)
    return lock


def _start_time(pid: int) -> str:
    """When a process began [clock ticks since boot]; empty when there is none: ids are reused, this pair is not."""
    try:
        stat = Path(f"/proc/{pid}/stat").read_text()
    except (FileNotFoundError, ProcessLookupError):
        return ""
    return stat.rpartition(")")[2].split()[19]


def _check(database: Database, path: Path) -> None:
    """Find damage, create what is new, migrate what is old."""
    try:
        with database.transaction() as connection:
            faults = list(connection.exec_driver_sql("PRAGMA quick_check(5)").scalars())
            if faults != ["ok"]:
                raise StoreCorrupted(f"{database.path}: damaged: {'; '.join(faults)}")
            if not inspect(connection).get_table_names():
                _create(connection, path)
            for version in range(check_version(connection, path), SCHEMA_VERSION):
                MIGRATIONS[version](connection)
                connection.execute(META.update().values(value=str(version + 1)).where(META.c.key == "schema_version"))
    except StoreCorrupted as error:
        num_versions = sum(1 for _ in path.glob("runs/*/versions/*.safetensors"))
        raise StoreCorrupted(
            f"{error}; put state.db back from a backup (and remove state.db-wal and state.db-shm), or start in another "
            f"directory. The {num_versions} model versions in {path}/runs/*/versions are safetensors files of their "
            "own and can still be read"
        ) from error


def _create(connection: Connection, path: Path) -> None:
    if any((path / "runs").iterdir()):
        raise StoreCorrupted(f"{path}/state.db is missing or empty, but {path}/runs holds the files of runs")
    metadata.create_all(connection)
    connection.execute(META.insert().values(key="schema_version", value=str(SCHEMA_VERSION)))
    write_atomically(path / "alive", b" " * 32)
    sync_folder(path)
    sync_folder(path.parent)
