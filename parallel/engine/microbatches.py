"""The division of one rank's batch into micro-batches.

A step's loss is the mean over all units of the global batch: examples, tokens, a sum of weights. A micro-batch
with c of the T units contributes its mean times c / T, so that uneven batches on uneven ranks are exact.
"""

from dataclasses import dataclass
from typing import Any

import torch

from atoll.ground.printable import count_of
from atoll.parallel.data.batch import Batch, Parts, count_units, part_sizes, units_in
from atoll.training.data.rows import Cut, Division, Forms


@dataclass(frozen=True, slots=True)
class Micro:
    """A micro-batch: some rows of a batch."""

    inputs: Any
    targets: Any

    count: float
    """Units over which its loss averages. 0: its loss must not be read, since a mean over nothing is NaN."""

    rows: int
    """The rows of `targets`; `inputs` may have been padded with more."""

    real: int
    """The first rows of `inputs` that are examples of the batch; the others keep a rank or a stage in step."""

    given: int
    """The rows of `inputs`."""


def split(batch: Batch, number: int, forms: Forms | None = None) -> list[Micro]:
    """Split the batch into `number` micro-batches of rows as equal as possible, the larger first.

    If it has fewer rows, the rest are fillers: all ranks of a mesh must run the same number of passes. A batch that was
    collated in parts has these.

    Args:
        batch: the batch of this rank.
        number: the number of micro-batches.
        forms: the forms of lists in earlier batches (`rows`).

    Raises:
        Undivided: it cannot be divided by its examples.
    """
    num_rows = rows_of(batch)
    if isinstance(batch.inputs, Parts):
        return _collated(batch)
    if number == 1:
        return [Micro(batch.inputs, batch.targets, batch.count, num_rows, 0 if batch.is_filler else num_rows, num_rows)]
    inputs, targets = _cuts(batch, num_rows, forms)
    found, start = [], 0
    for size in part_sizes(num_rows, number):
        end = start + size
        rows = slice(start, end) if end > start else slice(0, 1)
        of_part = targets.take(rows)
        count = 0 if end == start else _count(batch, of_part, end - start)
        num_given = rows.stop - rows.start
        num_real = 0 if batch.is_filler else end - start
        found.append(Micro(inputs.take(rows), of_part, count, num_given, num_real, num_given))
        start = end
    return found


def _collated(batch: Batch) -> list[Micro]:
    sizes = part_sizes(rows_of(batch), len(batch.inputs))
    counts = batch.counts() if batch.count else [0] * len(sizes)
    real = [0] * len(sizes) if batch.is_filler else sizes
    parts = zip(batch.inputs, batch.targets, counts, [max(size, 1) for size in sizes], real, strict=True)
    return [Micro(inputs, targets, count, size, num_real, size) for inputs, targets, count, size, num_real in parts]


def _cuts(batch: Batch, num_rows: int, forms: Forms | None) -> tuple[Cut, Cut]:
    division = Division(num_rows, forms, may_list=batch.may_list)
    return division.of(batch.inputs, "inputs"), division.of(batch.targets, "targets")


def split_padded(batch: Batch, number: int, size: int, forms: Forms | None = None) -> list[Micro]:
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
    inputs, targets = _cuts(batch, num_rows, forms)
    found = []
    for start in range(0, number * size, size):
        end = max(start, min(start + size, num_rows))
        of_part = targets.take(slice(start, end))
        count = 0 if end == start else _count(batch, of_part, end - start)
        with_copies = torch.arange(start, start + size).clamp(max=num_rows - 1)
        num_real = 0 if batch.is_filler else end - start
        found.append(Micro(inputs.take(with_copies), of_part, count, end - start, num_real, size))
    return found


def rows_of(batch: Batch) -> int:
    """Return the number of examples of a batch."""
    return batch.num_rows


def _count(batch: Batch, targets: Any, rows: int) -> float:
    """Return the units of some rows of a batch.

    If they are guessed, the device is read only if some targets are ignored.
    """
    if batch.count == 0:
        return 0
    if batch.units is count_units and isinstance(batch.targets, torch.Tensor) and batch.count == batch.targets.numel():
        return int(targets.numel())
    return units_in(batch.units, targets, rows)
