"""The wait of a process while another process uses its name. Pure."""

import random

from atoll.ground.backoff import delay

LONGEST_S = 120.0
"""Longest wait, unless the first one is longer [s]. When the other process ends, this one can connect after at most
this time."""


class Displaced:
    """Waits of one process, which grow until it has been connected for longer than the longest wait.

    Args:
        first: the first wait [s], before the jitter.
        rng: the source of the jitter; two processes with one name need two that differ.
    """

    def __init__(self, first: float, rng: random.Random) -> None:
        self._first, self._longest, self._rng = first, max(first, LONGEST_S), rng
        self.count = 0
        """Times in a row that it was displaced or refused."""

    def held_for(self, seconds: float) -> None:
        """Record how long a stream under this name lasted."""
        if seconds > self._longest:
            self.count = 0

    def next_wait(self) -> float:
        """Return the wait after one more displacement [s]."""
        self.count += 1
        return delay(self.count - 1, self._first, self._longest, self._rng)

    @property
    def is_news(self) -> bool:
        """Whether to log the last displacement: the first, the second, the fourth, ... in a row."""
        return self.count & (self.count - 1) == 0
