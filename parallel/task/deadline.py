"""Until when a training may go on. The clock is an argument."""

import math
from collections.abc import Callable


class Deadline:
    """An instant on a clock, which may be moved, and a request to stop, which may come at any time from any thread.

    Args:
        clock: the present instant [s], monotonic.
        at: the instant [s] on that clock; infinite when there is no deadline.
    """

    def __init__(self, clock: Callable[[], float], at: float = math.inf) -> None:
        self._clock = clock
        self._at = at
        self._is_stopped = False

    @classmethod
    def never(cls) -> "Deadline":
        """A deadline that never comes, for a training that nobody waits for."""
        return cls(lambda: 0.0)

    def now(self) -> float:
        """The present instant of the clock [s]."""
        return self._clock()

    def remaining(self) -> float:
        """Time that is left [s]: 0 when it is over or a stop was requested, infinite without a deadline."""
        return 0.0 if self._is_stopped else max(0.0, self._at - self._clock())

    def passed(self) -> bool:
        """Whether to stop now: the instant has come, or a stop was requested."""
        return self.remaining() == 0.0

    @property
    def is_stopped(self) -> bool:
        """Whether a stop was requested."""
        return self._is_stopped

    def stop(self) -> None:
        """Request an early stop. It cannot be taken back."""
        self._is_stopped = True

    def move(self, at: float) -> None:
        """Set another instant [s]."""
        self._at = at
