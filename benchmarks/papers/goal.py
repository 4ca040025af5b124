"""The goal of a run, a value of a metric, and the rounds to reach it, as papers count them."""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from atoll.simulations.experiments.report import RunReport
from atoll.task.metrics import is_loss


@dataclass(frozen=True, slots=True)
class Goal:
    """The value of a metric, WHO/METRIC, at which a run may stop."""

    metric: str
    value: float

    def is_met_by(self, line: Mapping[str, Any]) -> bool:
        """Return whether a round's line has the metric, with a value at least as good as the goal."""
        group, _, name = self.metric.partition("/")
        value = (line.get(group) or {}).get(name)
        return value is not None and (value <= self.value if is_loss(name) else value >= self.value)

    def rounds_of(self, report: RunReport) -> float | None:
        """Return the rounds until the best value so far crosses the goal, by linear interpolation; None: it never does.

        Source:
            McMahan et al. 2017, section 3: the learning curve is made monotonic, "taking the best value of test-set
            accuracy achieved over all prior rounds", and the crossing is that of the lines between its points.
        """
        before: tuple[float, float] | None = None
        sign = -1.0 if is_loss(self.metric) else 1.0
        for at, measured in zip(*report.curve(self.metric), strict=True):
            value, goal = sign * measured, sign * self.value
            if value >= goal:
                if before is None or value == goal:
                    return at
                return before[0] + (at - before[0]) * (goal - before[1]) / (value - before[1])
            before = (at, max(value, before[1]) if before is not None else value)
        return None
