"""The traces that a job leaves in a warm process: on the model, and in objects of the task's functions."""

from collections.abc import Iterable, Mapping
from typing import TYPE_CHECKING, Any

from atoll.task.told import logger
from atoll.training.model.as_built import AsBuilt

if TYPE_CHECKING:
    from atoll.task.local import Local
    from atoll.task.task import Task

SAID_MAX = 20
"""Largest number of places that one process names."""

_said: set[str] = set()


class Kept:
    """State that a custom training or evaluation keeps for the next one, which is named and not restored.

    It may be the data that was read, or an open log.

    Args:
        roots: the objects by the names that their differences get.
    """

    def __init__(self, roots: Mapping[str, Any]) -> None:
        self._state = AsBuilt(roots)

    def name(self) -> None:
        """Report the values that a job has changed."""
        _say(
            self._state.differences(),
            "a job has changed it, and later jobs find the changed value until this process ends: a simulation, or a "
            "site whose worker is restarted, does not",
        )


class LeftBehind:
    """State of a task's loss, metrics, units, optimizer and algorithm, restored before each job.

    State left by `fit` is only reported.

    Args:
        task: the task as it was loaded.
        local: the task's local settings, with the optimizer.
    """

    def __init__(self, task: "Task", local: "Local", *, with_process: bool = True) -> None:
        roots = {"loss": task.loss, "metrics": dict(task.metrics), "units": task.units, "algorithm": task.algorithm}
        self._given_back = AsBuilt(roots | {"optimizer": local.optimizer}, with_process=with_process)
        self._kept = None if task.fit is None else Kept({"fit": task.fit})

    def restore(self) -> None:
        """Restore the state of the task's functions, and report what had changed."""
        changed, kept = self._given_back.restore()
        _say(changed, "a job has changed it; each begins with it as it was when the task was loaded")
        _say(kept, "a job has changed it, and it is too large to be restored: later jobs find the changed value")
        if self._kept is not None:
            self._kept.name()


def restored(as_built: AsBuilt) -> bool:
    """Restore a model's state, and report what had changed; return whether the whole state could be restored."""
    changed, kept = as_built.restore()
    _say([*changed, *kept], "a job has changed it on the model; each begins with it as task.model() made it")
    return not kept


def _say(paths: Iterable[str], told: str) -> None:
    for path in paths:
        if path not in _said and len(_said) < SAID_MAX:
            _said.add(path)
            logger.info("%s: %s", path, told)
