"""The note about a wait, and its progress: what a command waits for, after a second; then how much of it is left."""

import sys
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager

from atoll.cli.printing import note, seconds
from atoll.cli.progress import Progress
from atoll.operations.reporter import Wait

SAY_S = 1.0
"""Seconds of waiting after which the person reads what the command waits for."""

EVERY_S = 10.0
"""Least seconds between two lines of progress, where the output is not a terminal."""


class TerminalWait(Wait, Progress):
    """A wait whose content can say how much of it is done, with the time left. Threads may call `advance`.

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
