"""What one rank trains on in one step, and how many units of the loss it is."""

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, replace
from typing import Any

import torch

IGNORED = -100
"""The target that the loss leaves out: `ignore_index` of `torch.nn.functional.cross_entropy`."""


@dataclass(frozen=True, slots=True)
class Batch:
    """One rank's share of a global batch."""

    inputs: Any
    """A tensor or a tree (mappings, lists, tuples) of them; the first dimension counts examples."""

    targets: Any
    """As the inputs; what the task's loss takes as its second argument."""

    count: int
    """Units that the loss averages over (examples, or valid tokens). Zero: a filler. It keeps a rank that has no data
    left in step with the others; whatever its loss is, it must be given the weight zero."""

    def to(self, device: torch.device | str) -> "Batch":
        """The batch on a device. From pinned memory the copy runs beside the computation."""
        inputs, targets = map_tensors(lambda t: t.to(device, non_blocking=True), (self.inputs, self.targets))
        return replace(self, inputs=inputs, targets=targets)


def count_units(targets: Any) -> int:
    """How many units a mean loss over these targets averages over.

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


def tensors(tree: Any) -> Iterator[torch.Tensor]:
    """The tensors of a tree, from left to right."""
    if isinstance(tree, torch.Tensor):
        yield tree
    elif isinstance(tree, Mapping):
        for value in tree.values():
            yield from tensors(value)
    elif isinstance(tree, list | tuple):
        for value in tree:
            yield from tensors(value)


def map_tensors(function: Callable[[torch.Tensor], torch.Tensor], tree: Any) -> Any:
    """A tree of the same form with the function of each tensor; lists become tuples."""
    if isinstance(tree, torch.Tensor):
        return function(tree)
    if isinstance(tree, Mapping):
        return {key: map_tensors(function, value) for key, value in tree.items()}
    if isinstance(tree, list | tuple):
        return tuple(map_tensors(function, value) for value in tree)
    return tree
