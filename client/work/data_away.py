"""The message about a task's data that cannot be read now but may be later: a mount or a server that is away."""

import os
import re
from pathlib import Path

_AWAY = re.compile(
    r"(?:\w+\.)*(?:FileNotFoundError|OSError|TimeoutError|Connection\w*Error|gaierror|URLError|NoData): "
)
"""Prefixes of errors of data that may come back: a disk that is not mounted yet, a server that is down."""

_NO_ROOM = re.compile(r"\[Errno (?:28|122)\]")
_PATH = re.compile(r"\[Errno \d+\] .*'([^']+)'$|^(?:\w+\.)*NoData: (/[^:]*): ")

AGAIN = "a service manager starts the agent again by itself (exit code 75)"


def said_of_data(error: str, reference: str) -> str | None:
    """Return the remedy for an error of a task's data; None: the error does not pass by itself.

    Args:
        error: the last line of a traceback, `module.Class: text`.
        reference: the task, `module:attribute` or `path/to/file.py:attribute`.
    """
    if _AWAY.match(error) is None:
        return None
    if _NO_ROOM.search(error):
        return f"free some space; {AGAIN}"
    found = _PATH.search(error)
    if found is None:
        return (
            f"{AGAIN}, when the data are there; if an address or a name is mistyped, correct it in {_file(reference)}"
        )
    path = Path(found[1] or found[2]).absolute()
    return (
        f"{path} {_state(path)}. If it is on a mount, {AGAIN}; if it is mistyped, correct it in {_file(reference)} or "
        "in the setting or variable that it reads"
    )


def _state(path: Path) -> str:
    if os.path.exists(path):
        return "cannot be read now"
    nearest = next(place for place in path.parents if os.path.exists(place))
    return f"does not exist (the nearest folder that does: {nearest})"


def _file(reference: str) -> str:
    return reference.rpartition(":")[0]
