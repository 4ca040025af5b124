"""The events of a training and their log: one JSON object for each event.

begin        step (from which it continues), steps, the settings
step         step, epoch, loss (before the step; none if private), grad_norm, lr, examples_per_s, memory_bytes, ...
evaluation   step, and DATA/METRIC for each
checkpoint   step; once it is complete
end          step, why (finished, early, budget, interrupted), seconds
"""

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

from atoll.task.json_text import to_json

Event = dict[str, Any]
"""Plain values; `event` is the kind."""

Report = Callable[[Event], None]


def to_all(*reports: Report) -> Report:
    """Return one report that passes events on to several."""

    def report(event: Event) -> None:
        for each in reports:
            each(event)

    return report


def json_log(path: Path) -> Report:
    """Return a report that appends each event to a file, as one line at once.

    After a restart the steps after the checkpoint come again: of several lines of one step, the last counts.
    """

    def report(event: Event) -> None:
        with path.open("a", encoding="utf-8") as file:
            file.write(to_json(event) + "\n")

    return report


def read_log(path: Path, kind: str) -> dict[int, Event]:
    """Return the events of a kind by their step; of several for one step the last."""
    found = {}
    for line in path.read_text("utf-8").splitlines():
        event = json.loads(line)
        if event["event"] == kind:
            found[event["step"]] = event
    return found
