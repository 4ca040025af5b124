"""The newest round and version of each run that a client has seen (`rollback_rules`), in memory and in a log.

    STATE/seen    one line of JSON for each change of a run; the last one of a run counts

`save` makes it durable before the client sends any outcome of an invitation. A crash before that loses only rounds for
which nothing was sent.
"""

import json
import os
import threading
from dataclasses import asdict
from pathlib import Path
from typing import Any

from atoll.client.session.rollback_rules import Seen
from atoll.ground.durable import write_private
from atoll.ground.folders import sync_folder
from atoll.ground.strict_json import INT64_MAX, fields_of, integer, refuse, text
from atoll.protocol.settings import ConfigError
from atoll.protocol.vocabulary import Digest, RoundId, RunId, Version

LINES_MIN, LINES_PER_RUN = 1000, 10
"""Lines of the file, in total and for each run, beyond which it is compacted."""

_KEYS = frozenset({"run", *asdict(Seen())})


class Memory:
    """Memory of the newest rounds and versions, backed by a file. `note` is quick; `save` may run on a thread.

    Raises:
        ConfigError: the file is damaged. A torn last line, which a crash leaves, is not damage.
    """

    def __init__(self, path: Path) -> None:
        self._path, self._lock = path, threading.Lock()
        self._seen, self._num_lines, self._end = _read(path)
        self._unsaved: set[RunId] = set()
        self._compact()

    def seen(self, run_id: RunId) -> Seen:
        """Return the newest round and version seen of a run."""
        return self._seen.get(run_id, Seen())

    def note(self, run_id: RunId, seen: Seen) -> None:
        """Record a newer round or version of a run, in memory."""
        with self._lock:
            self._seen[run_id] = seen
            self._unsaved.add(run_id)

    def save(self) -> None:
        """Make all records durable.

        Raises:
            OSError: the file cannot be written.
        """
        with self._lock:
            if not self._unsaved:
                return
            lines = b"".join(_line(run_id, self._seen[run_id]) for run_id in sorted(self._unsaved))
            file = os.open(self._path, os.O_WRONLY | os.O_CREAT | os.O_CLOEXEC, 0o600)
            try:
                os.ftruncate(file, self._end)  # truncates a torn line, of this process or of an earlier one
                os.pwrite(file, lines, self._end)
                os.fsync(file)
            finally:
                os.close(file)
            self._end, self._num_lines = self._end + len(lines), self._num_lines + len(self._unsaved)
            self._unsaved.clear()
            self._compact()

    def forget(self, run_id: RunId) -> bool:
        """Accept any round of a run again, as this site's operator allows; return whether the run was known."""
        with self._lock:
            if self._seen.pop(run_id, None) is None:
                return False
            self._unsaved.clear()
            self._write_anew()
        return True

    def runs(self) -> dict[RunId, Seen]:
        """Return the newest round and version seen of every run."""
        return dict(self._seen)

    def _compact(self) -> None:
        if self._num_lines > max(LINES_MIN, LINES_PER_RUN * len(self._seen)):
            self._write_anew()

    def _write_anew(self) -> None:
        content = b"".join(_line(run_id, seen) for run_id, seen in self._seen.items())
        write_private(self._path, content)
        sync_folder(self._path.parent)
        self._end, self._num_lines = len(content), len(self._seen)


def runs_in(path: Path) -> list[RunId]:
    """Return the newest round and version of each run in a file, which a running agent may be appending to.

    Raises:
        ConfigError: the file is damaged.
    """
    return sorted(run_id for run_id in _read(path)[0] if run_id)


def _line(run_id: RunId, seen: Seen) -> bytes:
    return json.dumps({"run": run_id, **asdict(seen)}, sort_keys=True).encode() + b"\n"


def _read(path: Path) -> tuple[dict[RunId, Seen], int, int]:
    """Return the file's content by run, its number of lines, and the offset at which its last whole line ends."""
    try:
        content = path.read_bytes()
    except FileNotFoundError:
        return {}, 0, 0
    whole = content[: content.rfind(b"\n") + 1]
    seen: dict[RunId, Seen] = {}
    for number, line in enumerate(whole.splitlines(), 1):
        try:
            run_id, newest = _parsed(json.loads(line))
        except (ValueError, RecursionError) as error:
            remedy = "put it back from a backup; without it this agent accepts rounds and versions that it has seen"
            raise ConfigError([f"{path}, line {number}: {error}: {remedy}"]) from None
        seen[run_id] = newest
    return seen, whole.count(b"\n"), len(whole)


def _parsed(value: Any) -> tuple[RunId, Seen]:
    fields = fields_of(value, "seen", keys=_KEYS)
    digest = fields["digest"]
    if type(digest) is not str or len(digest) not in (0, 64):
        refuse("digest", digest, "64 hexadecimal digits, or none")
    numbers = {
        key: integer(fields[key], key, low=0, high=INT64_MAX)
        for key in ("issued_us", "round_id", "base_version", "version")
    }
    seen = Seen(
        numbers["issued_us"],
        RoundId(numbers["round_id"]),
        Version(numbers["base_version"]),
        Version(numbers["version"]),
        Digest(digest),
    )
    return RunId(fields["run"] if fields["run"] == "" else text(fields["run"], "run", num_max=256)), seen
