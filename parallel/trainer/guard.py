"""The guard against an infinite loss: it finds the first such step, and seldom waits for the device."""

import torch
import torch.distributed as dist

NEVER = 2**62
"""A step number that stands for none."""


class Guard:
    """A record of the first step with a value that is not finite, kept on the device.

    Args:
        device: the device of this rank.
    """

    def __init__(self, device: torch.device) -> None:
        self._first = torch.tensor(NEVER, device=device)

    def see(self, step: int, *values: torch.Tensor | None) -> None:
        """Record on the device whether a step's loss, this rank's share of it and the gradient norm are finite."""
        for value in values:
            if value is not None:
                self._first = torch.where(value.isfinite(), self._first, self._first.clamp(max=step))

    def first_bad_step(self) -> int | None:
        """Return the first step with a value that is not finite on any rank, or None; every rank must call it."""
        first = self._first.clone()
        if dist.is_initialized() and dist.get_world_size() > 1:
            dist.all_reduce(first, dist.ReduceOp.MIN)
        return None if int(first) == NEVER else int(first)
