"""Cache of the lines of a base's digest between starts, so that files of 100 GB are not read each time.

    {FILE: {"stat": [device, inode, size, last change of the bytes, of the inode], "lines": {TENSOR: line}}}

A file with another stat is read again. A file that has changed within the last two seconds is not cached: it may change
again within a tick of the file system's clock.
"""

import json
import os
from collections.abc import Collection, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

BASES = "bases.json"
"""Name of the file in the directory of an agent, a run or a training."""

SETTLED_NS = 2_000_000_000
"""The age of a file's last change from which its lines are cached [ns]."""

Lines = dict[Path, dict[str, str]]


@contextmanager
def kept_lines(cache: Path | None, files: Collection[Path]) -> Iterator[Lines]:
    """Provide the cached lines of unchanged files by name; cache the lines that the block adds.

    Args:
        cache: the file of the lines; None: no cache. A file that cannot be read or written costs only time.
        files: all files that the block uses.
    """
    stats = {file: _stat(file) for file in files}  # before their bytes are read
    kept = _read(cache)
    lines: Lines = {}
    for file, stat in stats.items():
        entry = kept.get(str(file.absolute()), {})
        lines[file] = dict(entry["lines"]) if entry.get("stat") == stat else {}
    before = {file: len(found) for file, found in lines.items()}
    yield lines
    if cache is not None and any(len(lines[file]) > number for file, number in before.items()):
        found = {str(file.absolute()): {"stat": stats[file], "lines": lines[file]} for file in files}
        with suppress(OSError):
            _write(cache, kept | found)


def _stat(file: Path) -> list[int]:
    stat = file.stat()
    return [stat.st_dev, stat.st_ino, stat.st_size, stat.st_mtime_ns, stat.st_ctime_ns]


def _read(cache: Path | None) -> dict[str, Any]:
    if cache is None:
        return {}
    try:
        entries = json.loads(cache.read_text("utf-8"))
        return {file: entry for file, entry in entries.items() if _is_entry(entry)}
    except (OSError, ValueError, AttributeError):
        return {}


def _is_entry(entry: Any) -> bool:
    if not (isinstance(entry, dict) and isinstance(entry.get("stat"), list) and isinstance(entry.get("lines"), dict)):
        return False
    return all(isinstance(line, str) for line in entry["lines"].values())


def _write(cache: Path, entries: dict[str, Any]) -> None:
    part = cache.with_name(f"{cache.name}.{os.getpid()}.part")
    try:
        with part.open("w", encoding="utf-8") as file:
            now = os.fstat(file.fileno()).st_mtime_ns  # on the clock of the file system
            settled = {name: e for name, e in entries.items() if now - max(e["stat"][3:], default=now) > SETTLED_NS}
            json.dump(settled, file)
        os.replace(part, cache)
    finally:
        part.unlink(missing_ok=True)
