"""The disk below a folder: the durability of its entries, errors for want of room, and files that are missing."""

import errno
import os
from pathlib import Path


def sync_folder(path: Path) -> None:
    """Make the entries of a folder durable (fsync)."""
    folder = os.open(path, os.O_RDONLY | os.O_DIRECTORY)
    try:
        os.fsync(folder)
    finally:
        os.close(folder)


def no_file(path: str | Path) -> str:
    """Return the mistake that a path names no file."""
    return f"{path} is a directory: name a file" if Path(path).is_dir() else f"there is no file {path}"


def finds_no_room(error: BaseException) -> bool:
    """Return whether an error says that a disk is full, or a quota used up."""
    return isinstance(error, OSError) and error.errno in (errno.ENOSPC, errno.EDQUOT)
