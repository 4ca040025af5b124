"""The referee of what metrics decide: the best version of a run, and its early stop.

A second implementation, which keeps all values and looks at the whole list each time, where the machine keeps a sum.
"""

from collections.abc import Callable
from dataclasses import dataclass, field

from atoll.server.rounds import events as e
from atoll.server.rounds.run_rules import EarlyStop, RunRules, WatchedMetric

Values = list[tuple[int, float]]
"""Version and value, in the order of their arrival."""


@dataclass(slots=True)
class MeasureReferee:
    """The values of the watched metrics in one run, and the computations that have not ended."""

    rules: RunRules
    decide: Callable[..., None]
    computing: list[tuple[int, str]] = field(default_factory=list)
    of_best: Values = field(default_factory=list)
    of_stop: Values = field(default_factory=list)
    """Values of the early stop's metric since the run was begun or reopened."""

    def begin_again(self) -> None:
        """Repeat the computations that have not ended."""
        for version, source in self.computing:
            self.decide("compute", version, source)

    def reopened(self) -> None:
        """Forget the course of the early stop's metric: patience begins anew."""
        self.of_stop = []

    def measured(self, version: int, source: str, *, has_sums: bool) -> bool:
        """Take an evaluation, whose values are computed where they decide; return whether the run pauses for it."""
        if source not in {metric.source for metric in self.rules.watched}:
            return False
        if has_sums:
            self.computing.append((version, source))
            self.decide("compute", version, source)
            return False
        return any(not values for metric, values in self._watched() if metric.source == source)

    def computed(self, event: e.MetricsComputed, *, is_running: bool) -> bool:
        """Take the values of an evaluation; return whether they were awaited."""
        if (event.version, event.source) not in self.computing:
            return False
        self.computing.remove((event.version, event.source))
        for metric, values in self._watched():
            value = event.values.get(metric.name) if metric.source == event.source else None
            if value is not None and (is_running or values is not self.of_stop):
                values.append((event.version, value))
        return True

    def _watched(self) -> list[tuple[WatchedMetric, Values]]:
        best, stop = self.rules.best, self.rules.stop
        pairs = [(best, self.of_best), (None if stop is None else stop.metric, self.of_stop)]
        return [(metric, values) for metric, values in pairs if metric is not None]

    def awaits_value(self, unevaluated: set[int]) -> bool:
        """Return whether the end of the run depends on a value that is not known yet."""
        if self.rules.stop is None:
            return False
        source = self.rules.stop.metric.source
        return (source == "server" and bool(unevaluated)) or source in {s for _, s in self.computing}

    @property
    def has_stopped(self) -> bool:
        """Return whether the newest value has ended the run."""
        return self.rules.stop is not None and bool(self.of_stop) and _ends(self.rules.stop, self.of_stop)

    @property
    def best(self) -> tuple[int, float] | None:
        """The first of the versions with the best value."""
        if self.rules.best is None or not self.of_best:
            return None
        choose = max if self.rules.best.mode == "max" else min
        return choose(self.of_best, key=lambda pair: pair[1])


def _ends(stop: EarlyStop, values: Values) -> bool:
    """Return whether the last value reaches the target, or is the last of `patience` without an improvement."""
    sign = 1 if stop.metric.mode == "max" else -1
    course = [sign * value for _, value in values]
    if stop.target is not None and course[-1] >= sign * stop.target:
        return True
    record, at = course[0], 0
    for number, value in enumerate(course):
        if value - record > stop.min_delta:
            record, at = value, number
    return bool(stop.patience) and len(course) - 1 - at >= stop.patience


def values_of(statistics: e.Sums) -> dict[str, float | None]:
    """Return the mean of each pair of a sum and a count, as a task's metrics do."""
    return {name: sums[0] / sums[1] for name, sums in statistics.items()}
