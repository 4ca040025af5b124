"""The `main()` of a Flower app that is simulated natively: its folder, and its end after the last round."""

import json
from pathlib import Path
from typing import TYPE_CHECKING

from atoll.protocol.vocabulary import RunState
from atoll.simulations.federation.report import ROUNDS, history_of
from atoll.task.apps import AppTask
from atoll.task.array_task import ArrayTask
from atoll.task.task import Task

if TYPE_CHECKING:
    from atoll.simulations.federation.federation import Federation

APP, CONCLUDED = "app", "app.concluded"
"""Current folder of `main()`, and the file with the digest of the last version that it has received."""


def with_folder(task: Task | ArrayTask, folder: Path) -> Task | ArrayTask:
    """Return a task whose `main()` writes into the folder of its run; a task without `main()` is unchanged."""
    return task.in_folder(folder / APP) if isinstance(task, AppTask) else task


def conclude(federation: "Federation", folder: Path) -> None:
    """Let `main()` continue with the result of a finished run, once for each result; without `main()` do nothing.

    Raises:
        Exception: any error that it raises.
    """
    ledger, task = federation.machine.ledger, federation.setting.task
    concluded = folder / CONCLUDED
    if not isinstance(task, AppTask) or ledger.state is not RunState.FINISHED or ledger.model_digest is None:
        return
    if concluded.exists() and concluded.read_text(encoding="utf-8") == ledger.model_digest:
        return
    lines = map(json.loads, (folder / ROUNDS).read_text(encoding="utf-8").splitlines())
    task.conclude(federation.versions.arrays(ledger.model_digest), history_of(lines))
    concluded.write_text(ledger.model_digest, encoding="utf-8")
