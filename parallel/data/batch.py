"""The batch of one rank in one step, and its number of units of the loss."""

from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

import torch

from atoll.parallel.local_training.trees import map_tensors, tensors
from atoll.parallel.local_training.units import IGNORED, count_units

__all__ = ["IGNORED", "Batch", "count_units", "map_tensors", "tensors"]


@dataclass(frozen=True, slots=True)
class Batch:
    """One rank's share of a global batch."""

    inputs: Any
    """A tensor or a tree (`trees`) of them; the first dimension counts examples."""

    targets: Any
    """The targets in the same form, the second argument of the task's loss."""

    count: float
    """Units over which the loss averages (examples, valid tokens, a sum of weights). 0: a filler, which keeps a rank
    without data in step with the others; its loss must get the weight zero."""

    units: Callable[[Any], float] = count_units
    """targets -> units, for parts of the batch."""

    def to(self, device: torch.device | str) -> "Batch":
        """Return the batch on a device. From pinned memory the copy overlaps with the computation."""
        inputs, targets = map_tensors(lambda t: t.to(device, non_blocking=True), (self.inputs, self.targets))
        return replace(self, inputs=inputs, targets=targets)
