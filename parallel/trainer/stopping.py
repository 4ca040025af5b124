"""The agreement of the ranks to stop: a signal reaches one of them, and all must end after the same step."""

from collections.abc import Callable

import torch
import torch.distributed as dist

INTERVAL_S = 0.5
"""Approximate time between two agreements [s]."""


class Agreement:
    """A vote of all ranks, every few steps, on whether one of them was asked to stop.

    One tiny all-reduce on the CPU: [1 to stop, minus the steps until the next vote], of both the largest. The slowest
    rank determines how many steps take half a second; so all ranks vote at the same steps.

    Args:
        is_told: returns whether this process was asked to stop.
        clock: returns the present instant [s].
        group: the group of all ranks, for the CPU; None for one process.
    """

    def __init__(
        self, is_told: Callable[[], bool], clock: Callable[[], float], group: dist.ProcessGroup | None = None
    ) -> None:
        self._is_told, self._clock, self._group = is_told, clock, group
        self._voted_at, self._steps, self._left = clock(), 0, 1

    def should_stop(self) -> bool:
        """Return whether to stop now, the same on each rank; all ranks call it after every step."""
        if self._group is None:
            return self._is_told()
        self._steps += 1
        self._left -= 1
        if self._left:
            return False
        now = self._clock()
        pace = max((now - self._voted_at) / self._steps, 1e-6)
        vote = torch.tensor([int(self._is_told()), -max(1, min(10_000, int(INTERVAL_S / pace)))])
        dist.all_reduce(vote, dist.ReduceOp.MAX, group=self._group)
        self._voted_at, self._steps, self._left = self._clock(), 0, -int(vote[1])
        return bool(vote[0])
