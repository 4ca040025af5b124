"""Virtual time: what is planned happens in its order, and nobody waits in between."""

import heapq
from collections.abc import Callable
from typing import Any


class Timeline:
    """Actions by their instant [virtual s]; of one instant, in the order in which they were planned."""

    def __init__(self, now: float = 0.0) -> None:
        self.now = now
        self._heap: list[tuple[float, int, Callable[..., None], tuple[Any, ...]]] = []
        self._sequence = 0

    def at(self, when: float, action: Callable[..., None], *arguments: Any) -> None:
        """Plan an action; one of the past happens now."""
        self._sequence += 1  # so that what follows it is never compared
        heapq.heappush(self._heap, (when, self._sequence, action, arguments))

    def after(self, seconds: float, action: Callable[..., None], *arguments: Any) -> None:
        """Plan an action in so many virtual seconds."""
        self._sequence += 1
        heapq.heappush(self._heap, (self.now + seconds, self._sequence, action, arguments))

    def step(self) -> bool:
        """Let the next action happen; False: nothing is planned."""
        if not self._heap:
            return False
        when, _, action, arguments = heapq.heappop(self._heap)
        if when > self.now:
            self.now = when
        action(*arguments)
        return True
