"""The progress of a command: a bar or lines, and what it waits for, which is noted after a second."""

import math
import sys
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any, Self, TextIO

from atoll.cli.printing import note, seconds
from atoll.operations.reporter import Wait

if TYPE_CHECKING:
    from rich.progress import Progress as Drawn

SAY_S = 1.0
"""Seconds of waiting after which the person reads what the command waits for."""

EVERY_S = 10.0
"""Least seconds between two lines of progress, where the output is not a terminal."""


class Progress:
    """A bar on a terminal, `round 12/200 ━━━━━ accuracy 0.87`, which disappears at the end; elsewhere such lines.

    Args:
        what: the name of the counted thing, such as `round`.
        stream: the output; if it is a terminal, the bar is drawn on it.
        say: prints one line, where the output is not a terminal.
        is_counted: show `12/200`; else the text of each call says how much is done.
        every_s: least seconds between two lines.
        said_at: the instant before the first line, which follows `every_s` later; infinite: there are no lines.
    """

    def __init__(
        self,
        what: str,
        stream: TextIO,
        say: Callable[[str], None],
        *,
        is_counted: bool = True,
        every_s: float = 1.0,
        said_at: float = -math.inf,
    ) -> None:
        self._what, self._stream, self._say, self._is_counted = what, stream, say, is_counted
        self._every_s, self._said_at = every_s, said_at
        self._bar: Drawn | None = None

    def begin(self, total: float, done: float = 0) -> None:
        """Draw the bar before anything more is done."""
        if self._stream.isatty():
            self._draw(done, total, "")

    def show(self, done: float, total: float, text: str, *, at: float, is_last: bool = False) -> None:
        """Update the bar, or print a line if one is due.

        Args:
            done: the amount that is done.
            total: the amount of all.
            text: follows the bar, or ends the line.
            at: now, in seconds, on the scale of `said_at`.
            is_last: print the line in any case.
        """
        if self._stream.isatty():
            self._draw(done, total, text)
        elif at - self._said_at >= self._every_s or is_last:
            self._said_at = at
            self._say(f"{self._what} {done}/{total}  {text}" if self._is_counted else f"{self._what}: {text}")

    def tell(self, text: str) -> None:
        """Print a line, above the bar if there is one."""
        if self._bar is not None:
            self._bar.console.print(text, highlight=False, markup=False, soft_wrap=True)
        else:
            self._say(text)

    def _draw(self, done: float, total: float, text: str) -> None:
        if self._bar is None:
            self._bar = _bar(self._stream, self._is_counted)
            self._bar.add_task(self._what, text="")
            self._bar.start()
        self._bar.update(self._bar.task_ids[0], completed=done, total=total, text=text)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        """Remove the bar."""
        if self._bar is not None:
            self._bar.stop()


def _bar(stream: TextIO, is_counted: bool) -> "Drawn":
    from rich.console import Console
    from rich.progress import BarColumn, MofNCompleteColumn, TextColumn
    from rich.progress import Progress as Drawn
    from rich.table import Column

    def text(field: str, **options: Any) -> TextColumn:
        return TextColumn(f"{{task.{field}}}", markup=False, table_column=Column(no_wrap=True, **options))

    return Drawn(
        text("description"),
        *([MofNCompleteColumn(table_column=Column(no_wrap=True))] if is_counted else []),
        BarColumn(bar_width=12),
        text("fields[text]", overflow="ellipsis", ratio=1),
        console=Console(file=stream),
        transient=True,
        expand=True,
    )


class TerminalWait(Wait, Progress):
    """A wait on a terminal that shows how much is done and the time left. Threads may call `advance`.

    Args:
        what: the thing that the wait is for.
        is_told: returns whether the wait has been long enough to be told of.
        clock: seconds, on any scale.
    """

    def __init__(self, what: str, is_told: Callable[[], bool], clock: Callable[[], float] = time.monotonic) -> None:
        self._is_told, self._clock, self._begun = is_told, clock, clock()
        super().__init__(what, sys.stderr, note, is_counted=False, every_s=EVERY_S, said_at=self._begun)
        self._done = 0.0
        self._lock = threading.Lock()

    def advance(self, more: float, total: float) -> None:
        """Show that `more` of `total` is done, in any unit: bytes, lines."""
        with self._lock:
            self._done += more
            if self._is_told():
                self.show(self._done, total, self.text(total), at=self._clock())

    def text(self, total: float) -> str:
        """Return the share that is done and the seconds that are left at the mean speed so far."""
        share = min(1.0, self._done / total) if total else 1.0
        left = (self._clock() - self._begun) * (1 - share) / share if share else None
        return f"{share:.0%}, {seconds(left)} left"


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
    try:
        with TerminalWait(what, told.is_set) as wait:
            yield wait
    finally:
        timer.cancel()
