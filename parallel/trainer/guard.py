"""Notices the first step whose loss is no finite number, without waiting for the device in every step."""

import torch
import torch.distributed as dist

NEVER = 2**62


class Guard:
    """Looks at every step and speaks when it is asked.

    Args:
        device: of this rank.
    """

    def __init__(self, device: torch.device) -> None:
        self._first = torch.tensor(NEVER, device=device)

    def see(self, step: int, *values: torch.Tensor | None) -> None:
        """Take in what a step has shown: its loss, this rank's share of it, the norm of its gradient."""
        for value in values:
            if value is not None:
                self._first = torch.where(value.isfinite(), self._first, self._first.clamp(max=step))

    def first_bad_step(self) -> int | None:
        """The first one on any rank; every rank must ask."""
        first = self._first.clone()
        if dist.is_initialized() and dist.get_world_size() > 1:
            dist.all_reduce(first, dist.ReduceOp.MIN)
        return None if int(first) == NEVER else int(first)
