"""The division of one rank's batch into micro-batches.

A step's loss is the mean over all units of the global batch: examples, tokens, a sum of weights. A micro-batch
with c of the T units contributes its own mean times c / T, so that uneven batches on uneven ranks are exact.
"""

from dataclasses import dataclass
from typing import Any

import torch

from atoll.aggregation.printable import count_of
from atoll.parallel.data.batch import Batch, Parts, count_units, map_tensors, part_sizes, tensors, units_in
from atoll.parallel.task.errors import TaskBroken


@dataclass(frozen=True, slots=True)
class Micro:
    """Some rows of a batch."""

    inputs: Any
    targets: Any

    count: float
    """Units over which its loss averages. 0: its loss must not be read, since a mean over nothing is NaN."""

    rows: int
    """The rows of `targets`; `inputs` may have been padded with more."""


def split(batch: Batch, number: int) -> list[Micro]:
    """Split the batch into `number` micro-batches of rows as equal as possible, the larger first.

    If it has fewer rows, the rest are fillers: all ranks of a mesh must run the same number of passes. A batch that was
    collated in parts has these.

    Raises:
        TaskBroken: a tensor has no row for each example.
    """
    num_rows = rows_of(batch)
    if isinstance(batch.inputs, Parts):
        return _collated(batch)
    if number == 1:
        return [Micro(batch.inputs, batch.targets, batch.count, num_rows)]
    _check_rows(batch, num_rows)
    found, start = [], 0
    for size in part_sizes(num_rows, number):
        end = start + size
        rows = slice(start, end) if end > start else slice(0, 1)
        targets = _rows(batch.targets, rows)
        count = 0 if end == start else _count(batch, targets, end - start)
        found.append(Micro(_rows(batch.inputs, rows), targets, count, rows.stop - rows.start))
        start = end
    return found


def _collated(batch: Batch) -> list[Micro]:
    sizes = part_sizes(rows_of(batch), len(batch.inputs))
    counts = batch.counts() if batch.count else [0] * len(sizes)
    parts = zip(batch.inputs, batch.targets, counts, sizes, strict=True)
    return [Micro(inputs, targets, count, max(size, 1)) for inputs, targets, count, size in parts]


def _check_rows(batch: Batch, num_rows: int) -> None:
    for tensor in tensors((batch.inputs, batch.targets)):
        if tensor.dim() == 0 or len(tensor) != num_rows:
            raise TaskBroken(
                f"a batch of {count_of(num_rows, 'example')} has a tensor of shape {tuple(tensor.shape)}, which cannot "
                "be divided into micro-batches; allowed: tensors whose first dimension counts the examples"
            )


def split_padded(batch: Batch, number: int, size: int) -> list[Micro]:
    """Split the batch into `number` micro-batches whose inputs have exactly `size` rows.

    A pipeline sends activations of one shape. Inputs are padded with the last row, whose copies the loss must not see;
    targets are not padded.

    Raises:
        ValueError: the batch has more rows than fit.
    """
    num_rows = rows_of(batch)
    if num_rows > number * size:
        raise ValueError(
            f"a batch of {count_of(num_rows, 'example')} does not fit "
            f"{count_of(number, 'micro-batch', 'micro-batches')} of {size}"
        )
    _check_rows(batch, num_rows)
    found = []
    for start in range(0, number * size, size):
        end = max(start, min(start + size, num_rows))
        targets = _rows(batch.targets, slice(start, end))
        count = 0 if end == start else _count(batch, targets, end - start)
        found.append(Micro(_padded(batch.inputs, start, size, num_rows), targets, count, end - start))
    return found


def rows_of(batch: Batch) -> int:
    """Return the number of examples of a batch."""
    return batch.num_rows


def _count(batch: Batch, targets: Any, rows: int) -> float:
    """Return the units of some rows of a batch; if they are guessed, the device is read only if some targets are
    ignored.
    """
    if batch.count == 0:
        return 0
    if batch.units is count_units and isinstance(batch.targets, torch.Tensor) and batch.count == batch.targets.numel():
        return int(targets.numel())
    return units_in(batch.units, targets, rows)


def _rows(tree: Any, rows: slice) -> Any:
    return map_tensors(lambda tensor: tensor[rows], tree)


def _padded(tree: Any, start: int, size: int, num_rows: int) -> Any:
    rows = torch.arange(start, start + size).clamp(max=num_rows - 1)
    return map_tensors(lambda tensor: tensor[rows.to(tensor.device)], tree)
