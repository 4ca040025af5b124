"""Small files that are on disk when we say so, and the name of the failure when there is no room."""

import errno
import os
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from atoll.aggregation.folders import sync_folder


class DiskFull(OSError):
    """There is no room; nothing of what was to be written counts, and it may be tried again.

    Args:
        what: for whoever operates this machine.
        outside: for others.
    """

    def __init__(self, what: str, outside: str = "no room") -> None:
        super().__init__(what)
        self.outside = outside


def told_outside(error: OSError) -> str:
    """What others may know of it: no path, and nothing of how much is free."""
    if isinstance(error, DiskFull):
        return error.outside
    return os.strerror(error.errno) if error.errno else "an error of the disk"


def write_atomically(path: Path, content: bytes, *, sync_name: bool = True, is_durable: bool = True) -> None:
    """Let a file appear whole under its name, or not at all.

    Args:
        path: of the file.
        content: of it.
        sync_name: the name, too, is on disk on return.
        is_durable: the content is.

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


@contextmanager
def naming_full_disk(path: Path) -> Iterator[None]:
    """Call it DiskFull when a write finds no room.

    Raises:
        DiskFull: the disk or the quota is used up.
    """
    try:
        yield
    except OSError as error:
        if error.errno in (errno.ENOSPC, errno.EDQUOT):
            raise DiskFull(f"{path}: no room: {error.strerror}") from error
        raise
