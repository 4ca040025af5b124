"""The batch of one rank in one step, and its number of units of the loss."""

from dataclasses import dataclass, replace
from typing import Any

import torch

from atoll.parallel.local_training.trees import map_tensors, tensors

__all__ = ["IGNORED", "Batch", "count_units", "map_tensors", "tensors"]

IGNORED = -100
"""The target that the loss leaves out: `ignore_index` of `torch.nn.functional.cross_entropy`."""


@dataclass(frozen=True, slots=True)
class Batch:
    """One rank's share of a global batch."""

    inputs: Any
    """A tensor or a tree (`trees`) of them; the first dimension counts examples."""

    targets: Any
    """The targets in the same form, the second argument of the task's loss."""

    count: int
    """Units over which the loss averages (examples, or valid tokens). 0: a filler, which keeps a rank without data in
    step with the others; its loss must get the weight zero."""

    def to(self, device: torch.device | str) -> "Batch":
        """Return the batch on a device. From pinned memory the copy overlaps with the computation."""
        inputs, targets = map_tensors(lambda t: t.to(device, non_blocking=True), (self.inputs, self.targets))
        return replace(self, inputs=inputs, targets=targets)


def count_units(targets: Any) -> int:
    """Return the number of units over which a mean loss averages with these targets.

    Args:
        targets: integers (classes, tokens): their entries other than -100, which `cross_entropy` ignores; anything
            else: the length of the first dimension (of a tree: of its first tensor).

    Raises:
        ValueError: there is no tensor among the targets.
    """
    first = next(tensors(targets), None)
    if first is None:
        raise ValueError(f"no tensor among the targets to count, got {type(targets).__name__}")
    if first is targets and not (first.is_floating_point() or first.is_complex() or first.dtype == torch.bool):
        return int((first != IGNORED).sum())
    return len(first)
