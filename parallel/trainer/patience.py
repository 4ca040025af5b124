"""When to stop early: the metric has not become better for too long."""

import math
from collections.abc import Mapping
from typing import Any

from atoll.parallel.trainer.config import TrainConfig


class Patience:
    """Counts evaluations without a better value. Without `patience` in the config it is endless.

    Args:
        config: of the training.
    """

    def __init__(self, config: TrainConfig) -> None:
        self._config = config
        self.best: float | None = None
        """The best value so far."""
        self.waited = 0
        """Evaluations since then."""

    @property
    def is_over(self) -> bool:
        """Whether the training should stop."""
        return self._config.patience is not None and self.waited >= self._config.patience

    def see(self, value: float | None) -> None:
        """Take in one evaluation; a value that is undefined or no number is not better."""
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
        """For a checkpoint."""
        return {"best": self.best, "waited": self.waited}

    def load_state(self, state: Mapping[str, Any]) -> None:
        """Go on from a checkpoint."""
        self.best, self.waited = state["best"], state["waited"]
