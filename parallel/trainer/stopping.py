"""How the ranks agree to stop: a signal reaches one of them, and all must end after the same step."""

from collections.abc import Callable

import torch
import torch.distributed as dist

INTERVAL_S = 0.5
"""About so often the ranks ask each other."""


class Agreement:
    """Asks all ranks, every few steps, whether one of them was told to stop.

    One tiny all-reduce on the CPU: [whether to stop, minus the steps until the next time], of both the largest. How
    many steps take half a second the slowest rank says; so all of them always ask at the same step.

    Args:
        is_told: whether this process was told to stop.
        clock: the present instant [s].
        group: of all ranks, for the CPU; None where there is one process.
    """

    def __init__(
        self, is_told: Callable[[], bool], clock: Callable[[], float], group: dist.ProcessGroup | None = None
    ) -> None:
        self._is_told, self._clock, self._group = is_told, clock, group
        self._asked_at, self._steps, self._left = clock(), 0, 1

    def should_stop(self) -> bool:
        """To be called by all ranks after every step; the same answer on each."""
        if self._group is None:
            return self._is_told()
        self._steps += 1
        self._left -= 1
        if self._left:
            return False
        now = self._clock()
        pace = max((now - self._asked_at) / self._steps, 1e-6)
        said = torch.tensor([int(self._is_told()), -max(1, min(10_000, int(INTERVAL_S / pace)))])
        dist.all_reduce(said, dist.ReduceOp.MAX, group=self._group)
        self._asked_at, self._steps, self._left = self._clock(), 0, -int(said[1])
        return bool(said[0])
