"""The timer of a machine: the machine names the time at which it wants to be called, which moves with each event."""

import asyncio
from collections.abc import Callable

from atoll.server.clock import MonotoneClock


class MachineTimer:
    """Timer that follows the deadline of a machine.

    Args:
        loop: the loop that it runs on.
        clock: the clock of the deadlines.
        deadline: returns the current deadline [s since the epoch], or None.
        passed: called at the deadline; arms the timer again, through the event that it posts.
    """

    def __init__(
        self,
        loop: asyncio.AbstractEventLoop,
        clock: MonotoneClock,
        deadline: Callable[[], float | None],
        passed: Callable[[], object],
    ) -> None:
        self._loop, self._clock, self._deadline, self._passed = loop, clock, deadline, passed
        self._handle: asyncio.TimerHandle | None = None

    def arm(self) -> None:
        """Wait for the current deadline instead of an earlier one."""
        self.cancel()
        if (deadline := self._deadline()) is not None:
            self._handle = self._loop.call_later(max(0.0, deadline - self._clock.now()), self._fire)

    def cancel(self) -> None:
        """Wait for no deadline."""
        if self._handle is not None:
            self._handle.cancel()

    def _fire(self) -> None:
        deadline = self._deadline()
        if deadline is None or self._clock.now() < deadline:
            self.arm()  # the deadline moved, or the loop's timer fired a little early
        else:
            self._passed()
