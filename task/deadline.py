"""The end of a training's time. The clock is an argument."""

import math
from collections.abc import Callable


class Deadline:
    """An instant at which a training ends; it may be moved, and a stop may be requested at any time, from any thread.

    A custom training loop checks it before each step:

        while not deadline.passed():
            step()

    Args:
        clock: returns the present instant [s], monotonic.
        at: the instant of the end [s] on that clock; infinite if there is none.
    """

    def __init__(self, clock: Callable[[], float], at: float = math.inf) -> None:
        self._clock = clock
        self._at = at
        self._is_stopped = False

    @classmethod
    def never(cls) -> "Deadline":
        """Return a deadline that never comes, for a training without a time limit."""
        return cls(float)  # float() is 0.0, and pickle knows it by name

    def now(self) -> float:
        """Return the present instant of the clock [s]."""
        return self._clock()

    def remaining(self) -> float:
        """Return the time that is left [s]: 0 after the end or after a request to stop, infinite without a deadline."""
        return 0.0 if self._is_stopped else max(0.0, self._at - self._clock())

    def passed(self) -> bool:
        """Return whether to stop now: the instant has come, or a stop was requested."""
        return self.remaining() == 0.0

    @property
    def is_stopped(self) -> bool:
        """The flag of a requested stop."""
        return self._is_stopped

    def stop(self) -> None:
        """Request an early stop. It cannot be taken back."""
        self._is_stopped = True

    def move(self, at: float) -> None:
        """Set the instant of the end [s]."""
        self._at = at
