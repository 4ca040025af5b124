"""What a person sees of a sweep: how many cells have ended, which rounds the others are in, and the time left."""

import time
from collections.abc import Callable, Sequence
from typing import TextIO

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn

from atoll.cli.printing import seconds
from atoll.simulations.experiments.grid import Grid
from atoll.simulations.experiments.report import RunReport
from atoll.simulations.experiments.requested_metric import RequestedMetric
from atoll.simulations.experiments.sweep import Progress as Sweep


class SweepProgress:
    """Told where the sweep is, as often as one likes.

    Args:
        stream: where it goes; if it is a terminal, the line lives.
        say: prints one line.
        grid: of the cells.
        last: (a cell's folder) -> the last words of its process.
        clock: monotonic seconds.
    """

    def __init__(
        self,
        stream: TextIO,
        say: Callable[[str], None],
        grid: Grid,
        last: Callable[[str], str],
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._say, self._last, self._clock, self._began = say, last, clock, clock()
        self._names = {cell.folder: cell.name for cell in grid.cells}
        self._told: dict[str, str] = {}
        self._found = 0
        self._bar = _bar(stream) if stream.isatty() else None
        if self._bar is not None:
            self._task = self._bar.add_task("", total=len(self._names))
            self._bar.start()

    def see(self, sweep: Sweep) -> None:
        """Say what is new."""
        if not self._told:
            self._found = sweep.count("finished")
            if self._found:
                self._tell(f"{self._found} of {len(self._names)} cells are finished already")
        for folder, state in sweep.states.items():
            was = self._told.get(folder)
            if was != state and state in ("finished", "failed") and was is not None:
                what = f": {self._last(folder)}" if state == "failed" else ""
                self._tell(f"{self._names[folder]}: {state}{what}")
        self._told = dict(sweep.states)
        if self._bar is not None:
            ended = sweep.count("finished") + sweep.count("failed")
            going = ", ".join(f"{self._names[name]}: round {rounds}" for name, rounds in sweep.rounds.items())
            left = seconds(self.seconds_left(ended))
            self._bar.update(self._task, completed=ended, description=f"{left} left  {going}")

    def seconds_left(self, ended: int) -> float | None:
        """Until the last cell ends, if the rest takes as long as those that have ended here; None before the first."""
        here = ended - self._found
        return (self._clock() - self._began) / here * (len(self._names) - ended) if here else None

    def close(self) -> None:
        """The sweep has ended, or is interrupted."""
        if self._bar is not None:
            self._bar.stop()

    def _tell(self, text: str) -> None:
        if self._bar is not None:
            self._bar.console.print(text, highlight=False, markup=False, soft_wrap=True)
        else:
            self._say(text)


class MetricWatch:
    """Looks whether the metric that was asked for is measured, until a round has told.

    Args:
        wanted: the metric.
        read: (where the sweep is) -> the runs so far.
    """

    def __init__(self, wanted: RequestedMetric, read: Callable[[Sweep], Sequence[RunReport]]) -> None:
        self._wanted, self._read = wanted, read
        self._is_known, self._seen = False, 0

    def see(self, sweep: Sweep) -> None:
        """Look, when a round has ended since.

        Raises:
            ConfigError: the metric is not measured.
        """
        ended = sum(sweep.rounds.values()) + sweep.count("finished")
        if not self._is_known and ended != self._seen:
            self._seen = ended
            self._is_known = self._wanted.is_measured(self._read(sweep), is_over=False)


def _bar(stream: TextIO) -> Progress:
    return Progress(
        TextColumn("cell"),
        MofNCompleteColumn(),
        BarColumn(bar_width=12),
        TextColumn("{task.description}", markup=False),
        console=Console(file=stream),
        transient=True,
    )
