"""Early stopping: the end of a training whose metric no longer improves."""

import math
from collections.abc import Mapping
from typing import Any

from atoll.parallel.trainer.config import TrainConfig


class Patience:
    """A count of evaluations without a better value; endless without `patience` in the config.

    Args:
        config: the config of the training.
    """

    def __init__(self, config: TrainConfig) -> None:
        self._config = config
        self.best: float | None = None
        """The best value so far."""
        self.waited = 0
        """The number of evaluations since the best one."""

    @property
    def is_over(self) -> bool:
        """Whether the training should stop: its metric no longer improves."""
        return self._config.patience is not None and self.waited >= self._config.patience

    def see(self, value: float | None) -> None:
        """Record one evaluation; a value that is undefined or not finite is not better."""
        if value is not None and math.isfinite(value) and self._is_better(value):
            self.best, self.waited = value, 0
        else:
            self.waited += 1

    def _is_better(self, value: float) -> bool:
        if self.best is None:
            return True
        gain = self.best - value if self._config.goal == "min" else value - self.best
        return gain > self._config.min_delta

    def state(self) -> dict[str, Any]:
        """Return the state for a checkpoint."""
        return {"best": self.best, "waited": self.waited}

    def load_state(self, state: Mapping[str, Any]) -> None:
        """Restore the state of a checkpoint."""
        self.best, self.waited = state["best"], state["waited"]
