"""Whether a sweep's runs measure the metric that was asked for: what their task tells at the start, and rounds later.

A `Task` names its metrics, and the loss is always one. An `ArrayTask` names none: what it measures is known when the
first round has ended.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from atoll.parallel.task.array_task import ArrayTask
from atoll.parallel.task.task import Task
from atoll.protocol.settings import ConfigError
from atoll.simulations.experiments.grid import Cell
from atoll.simulations.experiments.report import GROUPS, RunReport

LOSS = "loss"
EVERY = {"server": ("evaluation.server_every", 1), "clients": ("evaluation.clients_every", 0)}
"""Which setting says how often they measure, and its default."""


@dataclass(frozen=True, slots=True)
class Wanted:
    """A metric that somebody has asked for."""

    metric: str
    """WHO/NAME."""
    source: str
    """Where it was asked for, as faults name it."""

    def check_name(self) -> None:
        """Raises ConfigError when no task at all has such a metric."""
        who, _, name = self.metric.partition("/")
        if who not in GROUPS or not name:
            raise self._refused(f"allowed: WHO/NAME, where WHO is one of {', '.join(GROUPS)}, such as server/{LOSS}")

    def check_start(self, task: Task | ArrayTask, cells: Sequence[Cell]) -> None:
        """Insist that some cell may measure it.

        Args:
            task: of all cells.
            cells: whose settings say how often who measures.

        Raises:
            ConfigError: none will; with what is measured instead.
        """
        self.check_name()
        who, _, name = self.metric.partition("/")
        if (reason := next(_silences(who, task, cells), None)) is not None:
            raise self._refused(f"nothing is measured there, for {reason}")
        if isinstance(task, Task) and name not in (names := sorted({LOSS, *task.metrics})):
            raise self._refused(f"allowed: {', '.join(f'{who}/{known}' for known in names)}")

    def is_measured(self, reports: Sequence[RunReport], *, is_over: bool) -> bool:
        """Whether some run has measured it; if not, a later round may.

        Args:
            reports: of the runs, also of those that go on.
            is_over: no more rounds come.

        Raises:
            ConfigError: no round will; with what is measured instead.
        """
        found = dict.fromkeys(name for report in reports for name in report.metrics)
        if self.metric in found:
            return True
        who = self.metric.partition("/")[0]
        if is_over or any(name.startswith(f"{who}/") for name in found):
            raise self._refused(f"measured are {', '.join(found) or 'none'}")
        return False

    def _refused(self, why: str) -> ConfigError:
        return ConfigError([f"{self.source}: got {self.metric!r}; {why}"])


def _silences(who: str, task: Task | ArrayTask, cells: Sequence[Cell]) -> Iterator[str]:
    """Why somebody measures nothing at all."""
    if who in EVERY:
        key, default = EVERY[who]
        if not any(cell.settings.get(key, default) for cell in cells):
            yield f"{key} is 0"
    if isinstance(task, Task):
        if who == "server" and task.test_data is None:
            yield "the task has no test_data"
        if who == "train" and task.fit is not None:
            yield "the task has a fit of its own"
