"""The readings of a site's data: which jobs share one, and the warning if a run reads its data more than once."""

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
    """Names of the readings, and the row counts of each task's newest reading, which survive the process.

    Args:
        reread: the setting of the agent.
        path: file with the row counts of the last readings.
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
        """Return the name of the reading for a job; a worker that has no reading of this name reads the data again."""
        if self._reread == "job":
            return f"job {next(self._jobs)}"
        return f"{run_id} {self._ends[run_id]}" if self._reread == "run" else "once"

    def run_ended(self, run_id: str) -> None:
        """Give later jobs of the run, after a resume, a new reading."""
        self._ends[run_id] += 1
        self._ended.add(run_id)

    def note(self, task: str, run_id: str, rows: Mapping[str, int]) -> None:
        """Record the rows of each split that a job has read; warn if an earlier process read them for the same run."""
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
        with suppress(OSError):  # the next process then does not know the reading
            self._path.write_text(json.dumps(self._last))
