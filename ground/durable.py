"""The durable, atomic write, move and removal of files, and the error of a full disk."""

import errno
import os
import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from atoll.ground.backoff import Temporary
from atoll.ground.folders import finds_no_room, sync_folder

COPY_BYTES = 1 << 20
"""Block size of a copy between two file systems [bytes]."""


class DiskFull(Temporary, OSError):
    """A write that failed for lack of space: no byte of it counts, and it may be repeated.

    Args:
        what: text for the operator of this machine.
        outside: text for other machines.
    """

    def __init__(self, what: str, outside: str = "no room") -> None:
        super().__init__(what)
        self.errno = errno.ENOSPC  # for callers that read the number alone
        self.outside = outside


class QuotaFull(DiskFull):
    """A write beyond one of Atoll's limits, which other writes use up; the disk has room."""


def told_outside(error: OSError) -> str:
    """Return the text of an error for other machines, without paths and without the free space."""
    if isinstance(error, DiskFull):
        return error.outside
    return os.strerror(error.errno) if error.errno else "an error of the disk"


def write_atomically(path: Path, content: bytes, *, sync_name: bool = True, is_durable: bool = True) -> None:
    """Write a file atomically: it appears under its name whole, or not at all.

    Args:
        path: the path of the file.
        content: the content of the file.
        sync_name: whether its name is on disk on return, too.
        is_durable: whether its content is on disk on return.

    Raises:
        DiskFull: there is no room.
    """
    part = path.with_name(path.name + ".part")
    with naming_full_disk(path), part.open("wb") as file:
        file.write(content)
        file.flush()
        if is_durable:
            os.fsync(file.fileno())
    os.replace(part, path)
    if sync_name and is_durable:
        sync_folder(path.parent)


def write_private(path: Path, content: bytes) -> None:
    """Write a file that only its owner may read, durably and atomically; its name is not synced.

    Raises:
        OSError: the file cannot be written.
    """
    part = path.with_name(path.name + ".part")
    part.unlink(missing_ok=True)
    file = os.open(part, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o600)
    with os.fdopen(file, "wb") as stream:  # private from its first byte on
        stream.write(content)
        stream.flush()
        os.fsync(stream.fileno())
    os.replace(part, path)


def remove(path: Path) -> None:
    """Delete a file, or a folder with its content, if it exists."""
    if path.is_dir() and not path.is_symlink():
        shutil.rmtree(path)
    else:
        path.unlink(missing_ok=True)


def move_into(source: Path, target: Path) -> None:
    """Move a synced file, also to another file system: an operator may mount a folder of a state directory.

    It appears under the new name whole, or not at all. The new name is not synced.

    Args:
        source: the file; it is gone afterwards.
        target: its new path.

    Raises:
        DiskFull: there is no room on the other file system.
    """
    try:
        os.replace(source, target)
        return
    except OSError as error:
        if error.errno != errno.EXDEV:
            raise
    part = target.with_name(target.name + ".part")
    try:
        with naming_full_disk(target), source.open("rb") as old, part.open("wb") as new:
            shutil.copyfileobj(old, new, COPY_BYTES)
            new.flush()
            os.fsync(new.fileno())
            os.fchmod(new.fileno(), os.fstat(old.fileno()).st_mode & 0o777)
        os.replace(part, target)
    except BaseException:
        part.unlink(missing_ok=True)
        raise
    source.unlink()


@contextmanager
def naming_full_disk(path: Path) -> Iterator[None]:
    """Turn the system's errors of writes that lack space, in the block, into DiskFull.

    Raises:
        DiskFull: the disk or the quota is used up.
    """
    try:
        yield
    except OSError as error:
        if finds_no_room(error):
            raise DiskFull(f"{path}: no room: {error.strerror}") from error
        raise
