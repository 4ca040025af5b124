"""The note about a wait, and its progress: what a command waits for, after a second; then how much of it is left."""

import sys
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

from atoll.cli.printing import note, seconds
from atoll.operations.reporter import Wait

if TYPE_CHECKING:
    from rich.progress import Progress, TaskID

SAY_S = 1.0
"""Seconds of waiting after which the person reads what the command waits for."""

EVERY_S = 10.0
"""Least seconds between two lines of progress, where the output is not a terminal."""


class TerminalWait(Wait):
    """A wait whose content can say how much of it is done.

    On a terminal a progress bar with the time left is drawn; elsewhere a line is printed now and then. Threads may call
    `advance`.

    Args:
        what: the thing that the wait is for.
        is_told: returns whether the wait has been long enough to be told of.
        clock: seconds, on any scale.
    """

    def __init__(self, what: str, is_told: Callable[[], bool], clock: Callable[[], float] = time.monotonic) -> None:
        self._what, self._is_told, self._clock = what, is_told, clock
        self._begun = self._shown_at = clock()
        self._done = 0.0
        self._lock = threading.Lock()
        self._bar: tuple[Progress, TaskID] | None = None

    def advance(self, more: float, total: float) -> None:
        """Show that `more` of `total` is done, in any unit: bytes, lines."""
        with self._lock:
            self._done += more
            if not self._is_told():
                return
            if sys.stderr.isatty():
                self._draw(total)
            elif self._clock() - self._shown_at >= EVERY_S:
                self._shown_at = self._clock()
                note(f"{self._what}: {self.text(total)}")

    def text(self, total: float) -> str:
        """Return the share that is done and the seconds that are left at the mean speed so far."""
        share = min(1.0, self._done / total) if total else 1.0
        left = (self._clock() - self._begun) * (1 - share) / share if share else None
        return f"{share:.0%}, {seconds(left)} left"

    def end(self) -> None:
        """Remove the progress bar."""
        if self._bar is not None:
            self._bar[0].stop()

    def _draw(self, total: float) -> None:
        if self._bar is None:
            bar = _bar()
            bar.start()
            self._bar = bar, bar.add_task(self._what, total=total, left="")
        self._bar[0].update(self._bar[1], completed=self._done, total=total, left=self.text(total))


def _bar() -> "Progress":
    from rich.console import Console
    from rich.progress import BarColumn, Progress, TextColumn

    columns: list[Any] = [
        TextColumn("{task.description}", markup=False),
        BarColumn(bar_width=20),
        TextColumn("{task.fields[left]}", markup=False),
    ]
    return Progress(*columns, console=Console(file=sys.stderr), transient=True)


@contextmanager
def waiting_for(what: str, limit: str) -> Iterator[TerminalWait]:
    """Print `waiting for WHAT (LIMIT)` to standard error once, if the block still runs after `SAY_S`.

    Args:
        what: the thing that the block waits for, such as `the coordinator at 127.0.0.1:7070`.
        limit: the end of the wait, in words: `up to 30 s`, or what ends it.

    Yields:
        The wait, for a block that knows how much of it is done; its progress follows that line.
    """
    told = threading.Event()

    def tell() -> None:
        note(f"waiting for {what} ({limit})")
        told.set()

    timer = threading.Timer(SAY_S, tell)
    timer.daemon = True
    timer.start()
    wait = TerminalWait(what, told.is_set)
    try:
        yield wait
    finally:
        timer.cancel()
        wait.end()
