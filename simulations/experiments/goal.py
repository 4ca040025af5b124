"""How far a run went: until a metric was good enough, as papers count it."""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from atoll.simulations.experiments.report import RunReport, is_loss


@dataclass(frozen=True, slots=True)
class Goal:
    """A value of a metric, WHO/METRIC, that a run is to come to."""

    metric: str
    value: float

    def is_met_by(self, line: Mapping[str, Any]) -> bool:
        """Whether a round's line has the metric, and it is at least as good."""
        group, _, name = self.metric.partition("/")
        found = (line.get(group) or {}).get(name)
        return found is not None and (found <= self.value if is_loss(name) else found >= self.value)

    def rounds_of(self, report: RunReport) -> float | None:
        """Rounds until the best value so far crosses the goal, linearly between two measurements; None: it never does.

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
