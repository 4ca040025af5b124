"""The traces that a job leaves in a warm process: on the model, and in what the task's functions hold."""

from collections.abc import Iterable

import torch

from atoll.parallel.local_training.as_built import AsBuilt
from atoll.parallel.local_training.told import logger
from atoll.parallel.task.local import Local
from atoll.parallel.task.task import Task

SAID_MAX = 20
"""The number of places that are named."""


class LeftBehind:
    """What a task's loss, metrics, optimizer and hooks keep, which each job finds as after loading; what `fit` keeps is
    only named, for a loop of one's own may hold an open log.

    Args:
        task: as it was loaded.
        local: its settings, with the optimizer.
    """

    def __init__(self, task: Task, local: Local) -> None:
        roots = {"loss": task.loss, "metrics": dict(task.metrics), "units": task.units, "algorithm": task.algorithm}
        self._given_back = AsBuilt(roots | {"optimizer": local.optimizer}, with_process=True)
        self._kept = None if task.fit is None else AsBuilt({"fit": task.fit})
        self._said: set[str] = set()

    def restore(self) -> None:
        """Give back what the task's functions held, and name what differs."""
        restored = self._given_back.restore()
        self._say(restored.changed, "a training or an evaluation changes it; each begins with it as after loading")
        kept = [*restored.kept, *(self._kept.differences() if self._kept is not None else ())]
        self._say(kept, "it stays from one training to the next, until this process ends: begin with it in each call")

    def restore_model(self, model: torch.nn.Module, as_built: AsBuilt) -> bool:
        """Give back a model's state, and name what differs; return whether all of it could be."""
        restored = as_built.restore()
        told = "a training or an evaluation changes it on the model; each begins with it as task.model() made it"
        self._say([*restored.changed, *restored.kept], told)
        return not restored.kept

    def _say(self, paths: Iterable[str], told: str) -> None:
        for path in paths:
            if path not in self._said and len(self._said) < SAID_MAX:
                self._said.add(path)
                logger.info("%s: %s", path, told)
