"""The watch on the files that Python opens, on which facts about a task's data may depend.

Through Python's audit events it sees `open`, the listing of folders and SQLite, but not files that a C library opens
itself. An audit hook cannot be removed, so it is set once, and costs a comparison while the watch is off.
"""

import os
import sys
from contextlib import suppress
from typing import Any

WRITING = os.O_WRONLY | os.O_RDWR | os.O_CREAT

SHARED = "ATOLL_SITES"
"""Environment variable that names the folder in which the cells of a sweep share the facts of the sites."""

Mark = tuple[int, int, int] | None
"""Size [bytes], and times of the last change of content and metadata [ns]; None: the file does not exist."""


class OpenedFiles:
    """Files and folders that this process has opened for reading since the watch began."""

    def __init__(self) -> None:
        self.is_on = False
        self._paths: dict[str, None] = {}
        self._num_told = 0

    def watch(self) -> None:
        """Begin the watch."""
        if not self.is_on:
            self.is_on = True
            sys.addaudithook(self._see)

    @property
    def paths(self) -> list[str]:
        """All absolute paths so far."""
        return list(self._paths)

    def news(self) -> list[str]:
        """Return the paths that are new since the last call, for the process that started this one."""
        paths = self.paths[self._num_told :]
        self._num_told += len(paths)
        return paths

    def add(self, paths: list[str]) -> None:
        """Add files that another process has opened."""
        self._paths |= dict.fromkeys(paths)

    def _see(self, event: str, arguments: tuple[Any, ...]) -> None:
        if event == "open":
            path, _, flags = arguments
            if isinstance(flags, int) and flags & WRITING:
                return
        elif event in ("os.listdir", "os.scandir", "sqlite3.connect"):
            path = arguments[0] if arguments and arguments[0] is not None else "."
        else:
            return
        with suppress(Exception):  # a hook that raises would fail the call
            if not isinstance(path, int):
                self._paths[os.path.abspath(os.fsdecode(path))] = None


OPENED = OpenedFiles()
"""The watch of this process."""


def mark_of(path: str) -> Mark:
    """Return the mark of a file or folder, which changes with its content."""
    try:
        found = os.stat(path)
    except (OSError, ValueError):
        return None
    return found.st_size, found.st_mtime_ns, found.st_ctime_ns
