"""The durability of a folder's entries, and the disk's errors in words."""

import errno
import os
from collections.abc import Mapping
from pathlib import Path


def sync_folder(path: Path) -> None:
    """Make the entries of a folder durable (fsync)."""
    folder = os.open(path, os.O_RDONLY | os.O_DIRECTORY)
    try:
        os.fsync(folder)
    finally:
        os.close(folder)


_OF_FILES: Mapping[type[OSError], str] = {
    FileNotFoundError: "there is no {0}",
    FileExistsError: "{0} exists already, and is not overwritten: name another path",
    IsADirectoryError: "{0} is a directory: name a file",
    NotADirectoryError: "{0} cannot be used: a part of its path is a file: name a directory",
    PermissionError: "{0} cannot be read or written: permission denied",
}


def in_words(error: OSError) -> str:
    """Return the message of an error; an OSError about a file becomes a sentence."""
    if not isinstance(error.filename, str | Path):
        return str(error)
    other = f"{{0}} cannot be used: {str(error.strerror).lower()}: name another path"
    return _OF_FILES.get(type(error), other).format(error.filename)


def no_file(path: str | Path) -> str:
    """Return the sentence that a path names no file, for a message."""
    return f"{path} is a directory: name a file" if Path(path).is_dir() else f"there is no file {path}"


def finds_no_room(error: BaseException) -> bool:
    """Return whether an error says that a disk is full, or a quota used up."""
    return isinstance(error, OSError) and error.errno in (errno.ENOSPC, errno.EDQUOT)
