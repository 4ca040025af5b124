"""The progress of a sweep: finished cells, the rounds of running cells, and the time left."""

import math
import time
from collections.abc import Callable
from typing import TextIO

from atoll.cli.printing import seconds
from atoll.cli.waiting import Progress
from atoll.ground.printable import count_of
from atoll.simulations.experiments.grid import Grid
from atoll.simulations.experiments.sweep import Progress as Sweep


class SweepProgress(Progress):
    """A progress bar on a terminal; elsewhere one line for each finished cell.

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
        super().__init__("cell", stream, say, said_at=math.inf)
        self._last, self._clock, self._began = last, clock, clock()
        self._names = {cell.folder: cell.name for cell in grid.cells}
        self._shown: dict[str, str] = {}
        self._finished_before = 0
        self.begin(len(self._names))

    def see(self, sweep: Sweep) -> None:
        """Show the cells and rounds that have ended since the last call."""
        if not self._shown:
            self._finished_before = sweep.count("finished")
            if self._finished_before:
                self.tell(f"finished already: {self._finished_before} of {count_of(len(self._names), 'cell')}")
        for folder, state in sweep.states.items():
            before = self._shown.get(folder)
            if before != state and state in ("finished", "failed") and before is not None:
                reason = f": {self._last(folder)}" if state == "failed" else ""
                self.tell(f"{self._names[folder]}: {state}{reason}")
        self._shown = dict(sweep.states)
        ended = sweep.count("finished") + sweep.count("failed")
        running = ", ".join(f"{self._names[name]}: round {rounds}" for name, rounds in sweep.rounds.items())
        left = seconds(self.seconds_left(ended))
        self.show(ended, len(self._names), f"{left} left  {running}", at=self._clock())

    def seconds_left(self, ended: int) -> float | None:
        """Return the time [s] until the last cell ends; None before the first cell has ended.

        It is the number of cells left x the mean time of the cells that have ended since the start.
        """
        since_start = ended - self._finished_before
        return (self._clock() - self._began) / since_start * (len(self._names) - ended) if since_start else None
