"""The coordinator's clock: seconds since the epoch that never run backward, also across a restart."""

import time


class Clock:
    """The wall clock at the start of the process, carried on by the monotonic clock.

    A jump of the system's clock moves no deadline. `not_before` is the last instant that the journal holds.
    """

    def __init__(self, not_before: float = 0.0) -> None:
        self._offset = max(time.time(), not_before) - time.monotonic()

    def now(self) -> float:
        """Seconds since the epoch."""
        return time.monotonic() + self._offset

    def advance_to(self, not_before: float) -> None:
        """Never show an instant before this one again."""
        self._offset = max(self._offset, not_before - time.monotonic())
