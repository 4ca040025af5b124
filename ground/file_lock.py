"""Locks on files (flock), which a process holds until it closes the file or ends, however it ends."""

import fcntl
import os
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

OWNER_BYTES_MAX = 64


class Locked(OSError):
    """Another process holds the lock; `owner` is its text in the file, at most 64 bytes."""

    def __init__(self, path: Path, owner: str) -> None:
        super().__init__(f"{path} is locked by another process ({owner or 'unknown'})")
        self.owner = owner


def lock_file(path: Path, owner: str = "", *, mode: int = 0o600) -> int:
    """Take the exclusive lock on a file without waiting, and return its descriptor: closing it releases the lock.

    Args:
        path: the path of the file, which is made when it is missing.
        owner: the new text of the file; empty: the text stays.
        mode: the mode of a new file.

    Raises:
        Locked: another process holds the lock.
        OSError: the file cannot be opened.
    """
    lock = os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, mode)
    try:
        fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        if owner:
            os.ftruncate(lock, 0)
            os.pwrite(lock, owner.encode(), 0)
    except BlockingIOError:
        other = os.pread(lock, OWNER_BYTES_MAX, 0).decode(errors="replace").strip()
        os.close(lock)
        raise Locked(path, other) from None
    except BaseException:
        os.close(lock)
        raise
    return lock


@contextmanager
def exclusively(lock: int) -> Iterator[None]:
    """Wait for the exclusive lock on an open file, and hold it while the block runs."""
    fcntl.flock(lock, fcntl.LOCK_EX)
    try:
        yield
    finally:
        fcntl.flock(lock, fcntl.LOCK_UN)


@contextmanager
def shared(path: Path) -> Iterator[None]:
    """Wait for the shared lock on a file, and hold it while the block runs.

    Raises:
        OSError: the file is missing or cannot be read.
    """
    lock = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
    try:
        fcntl.flock(lock, fcntl.LOCK_SH)
        yield
    finally:
        os.close(lock)
