"""The wait of a process whose name has another process with the place. Pure."""

import random

from atoll.ground.backoff import delay

LONGEST_S = 120.0
"""The longest wait, unless the first one is longer [s]. When the other process ends, this one has the place after at
most this time."""


class Displaced:
    """The waits of one process, which grow until it has held the place for longer than the longest of them.

    Args:
        first: the first wait [s], before the jitter.
        rng: the source of the jitter; two processes with one name need two that differ.
    """

    def __init__(self, first: float, rng: random.Random) -> None:
        self._first, self._longest, self._rng = first, max(first, LONGEST_S), rng
        self.count = 0
        """The times in a row that it was displaced or refused."""

    def held_for(self, seconds: float) -> None:
        """Note how long a stream lasted that held the place."""
        if seconds > self._longest:
            self.count = 0

    def next_wait(self) -> float:
        """Return the wait after one more time [s]."""
        self.count += 1
        return delay(self.count - 1, self._first, self._longest, self._rng)

    @property
    def is_news(self) -> bool:
        """Relevance of the last time for the log: the first, the second, the fourth, ... in a row."""
        return self.count & (self.count - 1) == 0
