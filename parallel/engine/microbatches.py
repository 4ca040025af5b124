"""How one rank's batch is divided into micro-batches.

A step's loss is the mean over all units of the global batch: examples, or tokens for a language model. A micro-batch
with c of the T units contributes its own mean times c / T, so that uneven batches on uneven ranks are exact.
"""

from dataclasses import dataclass
from typing import Any

import torch

from atoll.parallel.data.batch import Batch, count_units, map_tensors, tensors


@dataclass(frozen=True, slots=True)
class Micro:
    """Some rows of a batch."""

    inputs: Any
    targets: Any

    count: int
    """Units that its loss averages over. 0: what its loss says must not be asked; a mean over nothing is no number."""

    rows: int
    """Of `targets`; `inputs` may have been filled up with more."""


def split(batch: Batch, number: int) -> list[Micro]:
    """The batch in `number` micro-batches of rows as equal as possible, the larger first.

    With fewer rows than that the rest are fillers: the ranks of a mesh must all take the same number of passes.
    """
    num_rows = rows_of(batch)
    if number == 1:
        return [Micro(batch.inputs, batch.targets, batch.count, num_rows)]
    size, larger = divmod(num_rows, number)
    found, start = [], 0
    for index in range(number):
        end = start + size + (index < larger)
        rows = slice(start, end) if end > start else slice(0, 1)
        targets = _rows(batch.targets, rows)
        count = 0 if end == start else _count(batch, targets)
        found.append(Micro(_rows(batch.inputs, rows), targets, count, rows.stop - rows.start))
        start = end
    return found


def split_padded(batch: Batch, number: int, size: int) -> list[Micro]:
    """The batch in `number` micro-batches whose inputs have exactly `size` rows.

    A pipeline sends activations of one shape. Inputs are filled up with the last row, whose copies the loss must not
    see; targets are not filled up.

    Raises:
        ValueError: the batch has more rows than fit.
    """
    num_rows = rows_of(batch)
    if num_rows > number * size:
        raise ValueError(f"a batch of {num_rows} examples does not fit {number} micro-batches of {size}")
    found = []
    for start in range(0, number * size, size):
        end = max(start, min(start + size, num_rows))
        targets = _rows(batch.targets, slice(start, end))
        count = 0 if end == start else _count(batch, targets)
        found.append(Micro(_filled(batch.inputs, start, size, num_rows), targets, count, end - start))
    return found


def rows_of(batch: Batch) -> int:
    """Examples of a batch."""
    return len(next(tensors(batch.inputs)))


def _count(batch: Batch, targets: Any) -> int:
    """Units of some rows of a batch; a device is asked only where some of the batch's targets are ignored."""
    if batch.count == 0:
        return 0
    if isinstance(batch.targets, torch.Tensor) and batch.count == batch.targets.numel():
        return int(targets.numel())
    return count_units(targets)


def _rows(tree: Any, rows: slice) -> Any:
    return map_tensors(lambda tensor: tensor[rows], tree)


def _filled(tree: Any, start: int, size: int, num_rows: int) -> Any:
    rows = torch.arange(start, start + size).clamp(max=num_rows - 1)
    return map_tensors(lambda tensor: tensor[rows.to(tensor.device)], tree)
