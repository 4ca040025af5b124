"""Temporary errors of disks, mounts and servers: exit code 75 and one sentence with the way out.

After exit code 75 a service manager starts the command again.
"""

import errno
import os
import sqlite3
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

from atoll.ground.folders import finds_no_room
from atoll.ground.printable import printable_size
from atoll.operations.faults import CommandError, temporary_cause
from atoll.protocol.signals import ExitCode
from atoll.server.errors import DatabaseFull

START_BYTES = 1_000_000
"""Room that a start needs at least in its state directory [bytes]: a new coordinator's took 148 kB, an agent's 32 kB.
Journal and write-ahead log grow from there, and each model comes on top."""

AGAIN = f"a service manager starts it again by itself (exit code {ExitCode.AWAY})"


class TryAgain(CommandError):
    """A failure that passes by itself, or when a person has freed space; no setting is wrong."""

    code = ExitCode.AWAY


@contextmanager
def writing_to(
    option: str, folder: Path, needed: int = START_BYTES, *, spared: tuple[type[Exception], ...] = ()
) -> Iterator[None]:
    """Turn the block's error of a full or absent disk into `TryAgain` (exit code 75): one sentence about a folder.

    A file system that is mounted read-only is another matter: it stays so until a person remounts it (exit code 2).

    Args:
        option: the setting that names the folder.
        folder: the folder in which the block writes.
        needed: the room that the command needs at least [bytes].
        spared: errors that name their place themselves.

    Raises:
        TryAgain: there is no room, or the disk or mount does not answer now.
    """
    try:
        yield
    except spared:
        raise
    except (CommandError, ValueError, OSError, RuntimeError) as error:
        if (cause := temporary_cause(error)) is None or not _is_of_a_disk(cause):
            raise
        raise TryAgain(f"{option}: {disk_fault(cause, folder, needed)}") from error


def disk_fault(cause: BaseException, folder: Path, needed: int) -> str:
    """Return the sentence about a disk that takes no writes now.

    Args:
        cause: the error, one of `temporary_cause`.
        folder: the folder that was written to.
        needed: the room that the command needs at least [bytes].
    """
    free = _free_bytes(folder)
    if not _is_no_room(cause, is_low=free is not None and free < needed):
        what = os.strerror(cause.errno) if isinstance(cause, OSError) and cause.errno else str(cause)
        return f"{folder} cannot be used now: {what}. Check the disk or the mount; {AGAIN}"
    room = "its free space cannot be read" if free is None else f"the disk has {printable_size(free)} free"
    if isinstance(cause, OSError) and cause.errno == errno.EDQUOT:
        room = f"the quota is used up, while {room}"
    elif free is not None and free >= needed:
        room = f"no inode may be free, while {room}"
    return f"{folder} has no room: {printable_size(needed)} are needed at least, and {room}. Free some space; {AGAIN}"


def size_of(path: Path) -> int:
    """Return the size of a file, or of all files in a folder [bytes]; 0: there is nothing."""
    if not path.is_dir():
        return path.stat().st_size if path.exists() else 0
    found = 0
    for root, _, names in os.walk(path):
        for name in names:
            with suppress(OSError):  # deleted meanwhile
                found += os.lstat(os.path.join(root, name)).st_size
    return found


def _free_bytes(folder: Path) -> int | None:
    """Return the free space of the disk of a folder, which may not exist yet [bytes]; None: it cannot be read."""
    try:
        found = os.statvfs(existing_parent(folder))
    except OSError:
        return None
    return found.f_bavail * found.f_frsize


def existing_parent(path: Path) -> Path:
    """Return the path itself, or the nearest of its parents that exists."""
    path = path.absolute()
    return next((place for place in (path, *path.parents) if os.path.exists(place)), Path("/"))


def _is_no_room(cause: BaseException, *, is_low: bool = False) -> bool:
    """Return whether an error is one of no room; SQLite calls it an I/O error in some of its files."""
    if isinstance(cause, sqlite3.Error):
        return is_low or cause.sqlite_errorcode & 0xFF == sqlite3.SQLITE_FULL
    return finds_no_room(cause)


def _is_of_a_disk(cause: BaseException) -> bool:
    if isinstance(cause, DatabaseFull):  # of another machine's disk
        return False
    return _is_no_room(cause) or isinstance(cause, sqlite3.Error) or bool(getattr(cause, "errno", None))
