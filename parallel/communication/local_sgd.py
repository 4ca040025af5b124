"""Local SGD: the replicas train alone, and every H steps each takes the mean of all their weights.

    w_i <- mean over j of w_j        after the steps H - 1, 2 H - 1, ...

With H = 1 and plain SGD this is synchronous data parallelism. Only weights are averaged, no optimizer state.

Source: Stich, "Local SGD Converges Fast and Communicates Little", ICLR 2019, Algorithm 1.
"""

from collections.abc import Mapping

import torch
import torch.distributed as dist

from atoll.parallel.communication.means import Parameters, average, local_shards


class LocalSgd:
    """The method local SGD; see `outer.Outer`.

    Args:
        group: the replicas.
        every: H >= 1.
    """

    def __init__(self, group: dist.ProcessGroup, *, every: int) -> None:
        self._group, self._every = group, every
        self._are_apart = False

    def before_step(self, parameters: Parameters) -> None:
        """Do nothing: every replica follows its own gradient."""

    def after_step(self, parameters: Parameters, step: int) -> None:
        """Set the weights to the replicas' mean, if the step is the last of H."""
        self._are_apart = True
        if (step + 1) % self._every == 0:
            self.flush(parameters)

    def flush(self, parameters: Parameters) -> None:
        """Set the weights to the replicas' mean, if they have moved since the last mean."""
        if self._are_apart:
            average(local_shards(parameters), self._group)
            self._are_apart = False

    def state(self, parameters: Parameters) -> dict[str, torch.Tensor]:
        """Return no tensors: the steps' numbers determine the synchronizations."""
        if self._are_apart:
            raise RuntimeError("the replicas differ: flush before saving")
        return {}

    def load_state(self, state: Mapping[str, torch.Tensor], parameters: Parameters) -> None:
        """Note that the replicas are equal, as in every checkpoint."""
        self._are_apart = False
