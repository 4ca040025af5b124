"""Virtual time: planned actions run in the order of their times, without waiting in between."""

import heapq
from collections.abc import Callable
from typing import Any


class Timeline:
    """A queue of actions by their time [virtual s]; those of the same time run in the order of planning."""

    def __init__(self, now: float = 0.0) -> None:
        self.now = now
        self._heap: list[tuple[float, int, Callable[..., None], tuple[Any, ...]]] = []
        self._sequence = 0

    def at(self, when: float, action: Callable[..., None], *arguments: Any) -> None:
        """Plan an action for a time; one in the past runs now."""
        self._sequence += 1  # unique, so that the heap never compares actions
        heapq.heappush(self._heap, (when, self._sequence, action, arguments))

    def after(self, seconds: float, action: Callable[..., None], *arguments: Any) -> None:
        """Plan an action after a number of virtual seconds."""
        self._sequence += 1
        heapq.heappush(self._heap, (self.now + seconds, self._sequence, action, arguments))

    def step(self) -> bool:
        """Run the next action; return False if none is planned."""
        if not self._heap:
            return False
        when, _, action, arguments = heapq.heappop(self._heap)
        if when > self.now:
            self.now = when
        action(*arguments)
        return True


class DeadlineTimer:
    """A lazy timer at a moving deadline: it stays when the deadline moves later, and is armed again when it fires.

    Args:
        timeline: virtual time.
        deadline: returns the present deadline [virtual s]; None: there is none.
        passed: called when it is here.
    """

    def __init__(self, timeline: Timeline, deadline: Callable[[], float | None], passed: Callable[[], object]) -> None:
        self._timeline, self._deadline, self._passed = timeline, deadline, passed
        self._due: float | None = None

    def arm(self) -> None:
        """Fire at the deadline, if that is earlier than what is planned."""
        deadline = self._deadline()
        if deadline is not None and (self._due is None or deadline < self._due):
            self._due = deadline
            self._timeline.at(deadline, self._fire, deadline)

    def _fire(self, due: float) -> None:
        if due != self._due:
            return
        self._due = None
        deadline = self._deadline()
        if deadline is not None and deadline <= self._timeline.now:
            self._passed()
        else:
            self.arm()
