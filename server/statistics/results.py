"""The stored results of collections, one file each: `statistics/000001.json` in the coordinator's state directory."""

import json
import re
from pathlib import Path
from typing import Any

from atoll.ground.durable import write_atomically
from atoll.ground.folders import sync_folder

FOLDER = "statistics"
_NAME = re.compile(r"\d{6,}\.json", re.ASCII)


def numbers_in(state: Path) -> list[int]:
    """Return the numbers of the results, ascending."""
    folder = state / FOLDER
    names = (path.name for path in folder.iterdir()) if folder.is_dir() else ()
    return sorted(int(name.removesuffix(".json")) for name in names if _NAME.fullmatch(name))


def keep(state: Path, number: int, result: dict[str, Any]) -> bytes:
    """Write a result durably, and return its bytes.

    Raises:
        OSError: it cannot be written.
    """
    folder = state / FOLDER
    if not folder.is_dir():
        folder.mkdir(mode=0o700, exist_ok=True)
        sync_folder(state)
    content = json.dumps(result, indent=1, allow_nan=False, ensure_ascii=False).encode()
    write_atomically(folder / _name(number), content)
    return content


def read(state: Path, number: int = 0) -> dict[str, Any]:
    """Return a result; number 0: the newest.

    Raises:
        LookupError: there is no result with this number.
        OSError: it cannot be read.
    """
    kept = numbers_in(state)
    if not kept:
        raise LookupError("no statistics were requested yet: `atoll run statistics TASK` does this")
    if number and number not in kept:
        raise LookupError(f"there are no statistics {number}; there are {kept[0]} to {kept[-1]}")
    path = state / FOLDER / _name(number or kept[-1])
    try:
        found: dict[str, Any] = json.loads(path.read_bytes())
    except ValueError as error:
        raise OSError(f"{path} is damaged: {error}") from error
    return found


def _name(number: int) -> str:
    return f"{number:06d}.json"
