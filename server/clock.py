"""The coordinator's clock: seconds since the epoch that never run backward, also across a restart."""

import time
from collections.abc import Callable


class Clock:
    """The wall clock at the start of the process, carried on by the monotonic clock.

    A jump of the system's clock moves no deadline. `not_before` is the last instant that the journal holds.
    """

    def __init__(
        self,
        not_before: float = 0.0,
        *,
        wall: Callable[[], float] = time.time,
        monotonic: Callable[[], float] = time.monotonic,
    ) -> None:
        self._monotonic, self._not_before = monotonic, not_before
        self._offset = max(wall(), not_before) - monotonic()

    def now(self) -> float:
        """Seconds since the epoch."""
        return max(self._not_before, self._monotonic() + self._offset)  # the sum may be rounded down

    def advance_to(self, not_before: float) -> None:
        """Never show an instant before this one again."""
        self._not_before = max(self._not_before, not_before)
        self._offset = max(self._offset, not_before - self._monotonic())
