"""The check that the runs of a sweep measure the requested metric: first by their task, later by their rounds.

A `Task` names its metrics, and always has the loss. An `ArrayTask` names none: its metrics are known after the first
round.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from atoll.protocol.settings import ConfigError
from atoll.simulations.experiments.grid import Cell
from atoll.simulations.experiments.report import GROUPS, RunReport
from atoll.task.array_task import ArrayTask
from atoll.task.task import Task

LOSS = "loss"
EVERY = {"server": ("evaluation.server_every", 1), "clients": ("evaluation.clients_every", 0)}
"""Settings of the interval between measurements, and their defaults."""


@dataclass(frozen=True, slots=True)
class RequestedMetric:
    """Metric that a sweep requests."""

    metric: str
    """Name of the metric, GROUP/NAME."""
    source: str
    """Setting or option that requests it, for messages."""

    def check_name(self) -> None:
        """Check the form of the name; raise ConfigError if no task can have such a metric."""
        who, _, name = self.metric.partition("/")
        if who not in GROUPS or not name:
            raise self._refused(
                f"allowed: GROUP/NAME, where GROUP is one of {', '.join(GROUPS)}, such as server/{LOSS}"
            )

    def check_start(self, task: Task | ArrayTask, cells: Sequence[Cell]) -> None:
        """Check that some cell may measure the metric.

        Args:
            task: the task of all cells.
            cells: the cells, whose settings have the intervals between measurements.

        Raises:
            ConfigError: no cell will measure it; the message has the reason or the task's metrics.
        """
        self.check_name()
        who, _, name = self.metric.partition("/")
        if (reason := next(_obstacles(who, task, cells), None)) is not None:
            raise self._refused(f"it will not be measured, because {reason}")
        if isinstance(task, Task) and name not in (names := sorted({LOSS, *task.metrics})):
            raise self._refused(f"allowed: {', '.join(f'{who}/{known}' for known in names)}")

    def is_measured(self, reports: Sequence[RunReport], *, is_over: bool) -> bool:
        """Return whether some run has measured the metric; if not, a later round may.

        Args:
            reports: the reports of the runs, including those in progress.
            is_over: True if there will be no more rounds.

        Raises:
            ConfigError: no round will measure it; the message has the measured metrics.
        """
        measured = dict.fromkeys(name for report in reports for name in report.metrics)
        if self.metric in measured:
            return True
        who = self.metric.partition("/")[0]
        if is_over or any(name.startswith(f"{who}/") for name in measured):
            raise self._refused(f"the runs measure {', '.join(measured) or 'nothing'}")
        return False

    def _refused(self, reason: str) -> ConfigError:
        return ConfigError([f"{self.source}: got {self.metric!r}; {reason}"])


def _obstacles(who: str, task: Task | ArrayTask, cells: Sequence[Cell]) -> Iterator[str]:
    """Yield the reasons why a part of the federation measures nothing."""
    if who in EVERY:
        key, default = EVERY[who]
        if not any(cell.settings.get(key, default) for cell in cells):
            yield f"{key} is 0"
    if isinstance(task, Task):
        if who == "server" and task.test_data is None:
            yield "the task has no test_data"
        if who == "train" and task.fit is not None:
            yield "the task has a custom fit"
