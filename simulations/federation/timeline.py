"""Virtual time: planned actions run in the order of their times, without waiting in between."""

import heapq
from collections import deque
from collections.abc import Callable
from typing import Any

EPOCH = 1_740_700_800.0
"""The instant of virtual time 0, for apps [s since the epoch]: the earliest that Flower accepts for a message."""

Action = tuple[Callable[..., None], tuple[Any, ...]]


class Timeline:
    """Queue of actions by their time [virtual s]; actions at the same time run in the order of planning.

    Most actions share their time with many others, so the heap holds only the times.
    """

    def __init__(self, now: float = 0.0) -> None:
        self.now = now
        self._times: list[float] = []
        self._planned: dict[float, deque[Action]] = {}

    def at(self, when: float, action: Callable[..., None], *arguments: Any) -> None:
        """Plan an action for a time; an action in the past runs now."""
        planned = self._planned.get(when)
        if planned is None:
            planned = self._planned[when] = deque()
            heapq.heappush(self._times, when)
        planned.append((action, arguments))

    def after(self, seconds: float, action: Callable[..., None], *arguments: Any) -> None:
        """Plan an action after a number of virtual seconds."""
        when = self.now + seconds
        planned = self._planned.get(when)
        if planned is None:
            planned = self._planned[when] = deque()
            heapq.heappush(self._times, when)
        planned.append((action, arguments))

    def step(self) -> bool:
        """Run the next action; return False if none is planned."""
        while self._times:
            when = self._times[0]
            planned = self._planned[when]
            if not planned:
                heapq.heappop(self._times)
                del self._planned[when]
                continue
            if when > self.now:
                self.now = when
            action, arguments = planned.popleft()
            action(*arguments)
            return True
        return False


class DeadlineTimer:
    """Lazy timer for a moving deadline: it stays when the deadline moves later, and is armed again when it fires.

    Args:
        timeline: virtual time.
        deadline: returns the present deadline [virtual s]; None: no deadline.
        passed: called at the deadline.
    """

    def __init__(self, timeline: Timeline, deadline: Callable[[], float | None], passed: Callable[[], object]) -> None:
        self._timeline, self._deadline, self._passed = timeline, deadline, passed
        self._due: float | None = None

    def arm(self) -> None:
        """Fire at the deadline, if that is earlier than the planned time."""
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
