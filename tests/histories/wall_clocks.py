"""The wall clocks of a world's machines: while a process runs, its clock is set, drifts or stands still for a time."""

import random

from tests.histories.scheduling import World

JUMPS_S = (3.0, 60.0, 200.0, 290.0, 600.0, 5000.0)
"""The size of the jumps [s]: below and above each bound that a clock may be off."""
DRIFTS = (-1.0, -0.05, 0.001, 0.05)
"""The error that a clock gains in a second [s]; -1: it stands still."""


class WallClock:
    """The wall clock of one machine; `error` is how far it is ahead of the world's [s]."""

    def __init__(self, world: World, rng: random.Random) -> None:
        self._world, self._rng = world, rng
        self.times_wrong = self.jumps = 0  # while it ran, and while its machine was down
        self._error = self._rate = self._since = self._worst = 0.0

    def now(self) -> float:
        """Return the time that the clock shows [s]."""
        return self._world.now + self.error

    @property
    def error(self) -> float:
        """The time that the clock shows less that of the world [s]."""
        return self._error + self._rate * (self._world.now - self._since)

    @property
    def worst(self) -> float:
        """The largest error so far, ahead or behind [s]."""
        return max(self._worst, abs(self._error), abs(self.error))

    def set(self, error: float = 0.0, rate: float = 0.0) -> None:
        """Set the clock.

        Args:
            error: what it shows too much from now on [s].
            rate: the error that it gains in a second [s].
        """
        self._worst = self.worst
        self._error, self._rate, self._since = error, rate, self._world.now

    def go_wrong(self) -> str:
        """Let the clock go wrong in a drawn way; return the words for it."""
        self.times_wrong += 1
        if self._rng.random() < 0.5:
            by = self._rng.choice((-1, 1)) * self._rng.choice(JUMPS_S) * self._rng.uniform(0.8, 1.0)
            self.set(self.error + by, self._rate)
            return f"its clock is set by {by:+.1f} s"
        rate = self._rng.choice(DRIFTS)
        self.set(self.error, rate)
        return "its clock stands still" if rate == -1.0 else f"its clock gains {rate:+.3f} s in a second"
