"""The batch of one rank in one step, and its number of units of the loss."""

from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

import torch

from atoll.training.data.draws import Fetch
from atoll.training.data.trees import map_tensors, tensors
from atoll.training.data.units import IGNORED, count_units, units_in

__all__ = ["IGNORED", "Batch", "Parts", "count_units", "map_tensors", "tensors", "units_in"]


class Parts(list[Any]):
    """The inputs or the targets of a batch whose micro-batches are collated one by one.

    A batch of any form can be divided: a graph's nodes, padded strings, a list of images have no row for each example.
    """


def in_parts(fetch: Fetch, epoch: int, indices: torch.Tensor, number: int) -> tuple[Parts, Parts]:
    """Return the inputs and the targets of `number` micro-batches; one without examples has the first, as a filler."""
    pieces = torch.tensor_split(indices, number)
    inputs, targets = zip(*(fetch(epoch, piece if len(piece) else indices[:1]) for piece in pieces), strict=True)
    return Parts(inputs), Parts(targets)


def part_sizes(rows: int, number: int) -> list[int]:
    """Return the examples of each micro-batch, as equal as possible, the larger first."""
    size, larger = divmod(rows, number)
    return [size + (index < larger) for index in range(number)]


@dataclass(frozen=True, slots=True)
class Batch:
    """One rank's share of a global batch."""

    inputs: Any
    """A tensor or a tree (`trees`) of them; or `Parts`, each of any form that the model takes."""

    targets: Any
    """The targets in the same form, the second argument of the task's loss."""

    count: float
    """Units over which the loss averages (examples, valid tokens, a sum of weights). 0: a filler, which keeps a rank
    without data in step with the others; its loss must get the weight zero."""

    units: Callable[[Any], float] = count_units
    """targets -> units, for parts of the batch."""

    rows: int | None = None
    """The number of examples; None: the first dimension of the inputs' first tensor."""

    may_list: bool = False
    """Whether the task's collation has made it; torch's makes no lists of one tensor for each example."""

    is_filler: bool = False
    """Whether its examples are fillers, outside of the global batch."""

    @classmethod
    def of(
        cls,
        fetched: tuple[Any, Any],
        units: Callable[[Any], float],
        rows: int,
        *,
        is_filler: bool,
        may_list: bool = False,
    ) -> "Batch":
        """Return a batch of some rows, which may have been fetched `in_parts`; a filler has no units."""
        inputs, targets = fetched
        batch = cls(inputs, targets, 0, units, rows, may_list, is_filler)
        return batch if is_filler else replace(batch, count=sum(batch.counts()))

    def counts(self) -> list[float]:
        """Return the units of each part; of a whole batch, its units."""
        if not isinstance(self.targets, Parts):
            return [units_in(self.units, self.targets, self.num_rows)]
        sizes = part_sizes(self.num_rows, len(self.targets))
        return [units_in(self.units, part, size) if size else 0 for part, size in zip(self.targets, sizes, strict=True)]

    @property
    def num_rows(self) -> int:
        """The number of examples."""
        return len(next(tensors(self.inputs))) if self.rows is None else self.rows

    def to(self, device: torch.device | str) -> "Batch":
        """Return the batch on a device. From pinned memory the copy overlaps with the computation."""
        inputs, targets = map_tensors(lambda t: t.to(device, non_blocking=True), (self.inputs, self.targets))
        return replace(self, inputs=inputs, targets=targets)
