"""The readings of a site's data: which jobs share one, and what the site is told if a run has more than one."""

import json
import logging
from collections import Counter
from collections.abc import Mapping
from contextlib import suppress
from itertools import count
from pathlib import Path
from typing import Any, Literal

logger = logging.getLogger(__name__)

Reread = Literal["run", "job", "never"]


class Readings:
    """The names of readings, and the rows of the newest one of each task, which outlive this process.

    Args:
        reread: the setting of the agent.
        path: the file of what was read last.
    """

    def __init__(self, reread: Reread, path: Path) -> None:
        self._reread, self._path = reread, path
        self._ends, self._jobs = Counter[str](), count(1)
        self._ended: set[str] = set()
        self._last: dict[str, Any] = {}
        with suppress(OSError, ValueError):
            found = json.loads(path.read_text())
            self._last = found if isinstance(found, dict) else {}

    def of(self, task: str, run_id: str) -> str:
        """Return the name of the reading that a job takes; a worker that has none of this name reads the data anew."""
        if self._reread == "job":
            return f"job {next(self._jobs)}"
        return f"{run_id} {self._ends[run_id]}" if self._reread == "run" else "once"

    def run_ended(self, run_id: str) -> None:
        """Let a later job of the run, after a resume, have another reading."""
        self._ends[run_id] += 1
        self._ended.add(run_id)

    def note(self, task: str, run_id: str, rows: Mapping[str, int]) -> None:
        """Record the rows of each split that a job has read; warn if its run has read them in an earlier process."""
        if not rows:
            return
        last = self._last.get(task)
        before = last["rows"] if isinstance(last, dict) and last.get("run") == run_id else {}
        again = [f"{rows[split]} of {split} ({before[split]} before)" for split in rows if split in before]
        if again and run_id not in self._ended and self._reread != "job":
            text = "run %s has read its data again in its course: rows %s"
            logger.warning(text, run_id, ", ".join(again), extra={"run": run_id})
        self._ended.discard(run_id)
        self._last[task] = {"run": run_id, "rows": {**before, **rows}}
        with suppress(OSError):  # the next process then does not know it
            self._path.write_text(json.dumps(self._last))
