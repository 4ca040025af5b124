"""The coordinator's clock: seconds since the epoch that never run backward, also across a restart."""

import time
from collections.abc import Callable


class Clock:
    """The wall clock at the start of the process, advanced by the monotonic clock.

    A jump of the system's clock moves no deadline.

    Args:
        not_before: the last instant in the journal [s since the epoch]; the clock never shows an earlier one.
        wall: the clock of the system [s since the epoch].
        monotonic: a clock that never runs backward, of any origin [s].
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
        """Return the time [s since the epoch]."""
        return max(self._not_before, self._monotonic() + self._offset)  # the sum may be rounded down

    def advance_to(self, not_before: float) -> None:
        """Advance the clock to at least this instant [s since the epoch]."""
        self._not_before = max(self._not_before, not_before)
        self._offset = max(self._offset, not_before - self._monotonic())
