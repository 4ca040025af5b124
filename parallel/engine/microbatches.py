"""How one rank's batch is divided into micro-batches.

A step's loss is the mean over all units of the global batch: examples, or tokens for a language model. A micro-batch
with c of the T units contributes its own mean times c / T, so that uneven batches on uneven ranks are exact.
"""

from dataclasses import dataclass
from typing import Any

import torch

from atoll.parallel.data.batch import IGNORED, Batch, map_tensors, tensors


@dataclass(frozen=True, slots=True)
class Micro:
    """Some rows of a batch."""

    inputs: Any
    targets: Any

    count: int | torch.Tensor
    """Units that its loss averages over; a tensor on the device where counting must not wait for it."""

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
        count = 0 if end == start or batch.count == 0 else _count(targets)
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
        count = 0 if batch.count == 0 or end == start else _count(targets)
        found.append(Micro(_filled(batch.inputs, start, size, num_rows), targets, count, end - start))
    return found


def rows_of(batch: Batch) -> int:
    """Examples of a batch."""
    return len(next(tensors(batch.inputs)))


def _count(targets: Any) -> int | torch.Tensor:
    """As `data.batch.count_units`, without waiting for a device."""
    if isinstance(targets, torch.Tensor) and not targets.is_floating_point() and targets.dtype != torch.bool:
        return (targets != IGNORED).sum()
    return len(next(tensors(targets)))


def _rows(tree: Any, rows: slice) -> Any:
    return map_tensors(lambda tensor: tensor[rows], tree)


def _filled(tree: Any, start: int, size: int, num_rows: int) -> Any:
    rows = torch.arange(start, start + size).clamp(max=num_rows - 1)
    return map_tensors(lambda tensor: tensor[rows.to(tensor.device)], tree)
