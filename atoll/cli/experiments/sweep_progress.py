"""The progress of a sweep: finished cells, the rounds of running cells, and the time left."""

import time
from collections.abc import Callable
from typing import TextIO

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn

from atoll.cli.printing import seconds
from atoll.ground.printable import count_of
from atoll.simulations.experiments.grid import Grid
from atoll.simulations.experiments.sweep import Progress as Sweep


class SweepProgress:
    """A progress bar on a terminal, one line for each cell that ends elsewhere.

    Args:
        stream: the output; if it is a terminal, a progress bar is drawn on it.
        say: prints one line.
        grid: the grid of the cells.
        last: (a cell's folder) -> the last line of its process's output.
        clock: monotonic time in seconds.
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
        self._shown: dict[str, str] = {}
        self._finished_before = 0
        self._bar = _bar(stream) if stream.isatty() else None
        if self._bar is not None:
            self._task = self._bar.add_task("", total=len(self._names))
            self._bar.start()

    def see(self, sweep: Sweep) -> None:
        """Show what has changed since the last call."""
        if not self._shown:
            self._finished_before = sweep.count("finished")
            if self._finished_before:
                self._print(f"finished already: {self._finished_before} of {count_of(len(self._names), 'cell')}")
        for folder, state in sweep.states.items():
            before = self._shown.get(folder)
            if before != state and state in ("finished", "failed") and before is not None:
                reason = f": {self._last(folder)}" if state == "failed" else ""
                self._print(f"{self._names[folder]}: {state}{reason}")
        self._shown = dict(sweep.states)
        if self._bar is not None:
            ended = sweep.count("finished") + sweep.count("failed")
            running = ", ".join(f"{self._names[name]}: round {rounds}" for name, rounds in sweep.rounds.items())
            left = seconds(self.seconds_left(ended))
            self._bar.update(self._task, completed=ended, description=f"{left} left  {running}")

    def seconds_left(self, ended: int) -> float | None:
        """Return the time [s] until the last cell ends; None before the first cell has ended.

        It is the number of cells left x the mean time of the cells that have ended since the start.
        """
        since_start = ended - self._finished_before
        return (self._clock() - self._began) / since_start * (len(self._names) - ended) if since_start else None

    def close(self) -> None:
        """Remove the progress bar."""
        if self._bar is not None:
            self._bar.stop()

    def _print(self, text: str) -> None:
        if self._bar is not None:
            self._bar.console.print(text, highlight=False, markup=False, soft_wrap=True)
        else:
            self._say(text)


def _bar(stream: TextIO) -> Progress:
    return Progress(
        TextColumn("cell"),
        MofNCompleteColumn(),
        BarColumn(bar_width=12),
        TextColumn("{task.description}", markup=False),
        console=Console(file=stream),
        transient=True,
    )
