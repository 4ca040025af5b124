"""The examples of one rank in one step, and how they are divided into micro-batches.

A step's loss is the mean over all units of the global batch: examples, or tokens for a language model. A micro-batch
with c of the T units contributes its own mean times c / T, so that uneven batches on uneven ranks are exact.
"""

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any

import torch

IGNORED = -100
"""The target that `torch.nn.functional.cross_entropy` leaves out of its mean."""


@dataclass(frozen=True, slots=True)
class Batch:
    """What a model is given, and what it should have said."""

    inputs: Any
    """A tensor, or a tree (tuples, mappings) of tensors, each with the examples along its first dimension."""

    targets: Any
    """The same for the loss."""

    count: int | None = None
    """Units that the loss averages over; None: as `count_units` finds. 0: a filler, of no weight, for a rank that has
    run out of data while others have not."""


def count_units(targets: Any) -> int:
    """Over how many units a mean loss averages: of integer targets those that are not -100, of others the examples."""
    first = next(tensors(targets))
    if first.is_floating_point() or first.dtype in (torch.bool, torch.complex64, torch.complex128):
        return len(first)
    return int((first != IGNORED).sum())


def tensors(tree: Any) -> Iterator[torch.Tensor]:
    """The tensors of a tree, in order."""
    if isinstance(tree, torch.Tensor):
        yield tree
    elif isinstance(tree, Mapping):
        for value in tree.values():
            yield from tensors(value)
    elif isinstance(tree, list | tuple):
        for value in tree:
            yield from tensors(value)


def each(change: Callable[[torch.Tensor], torch.Tensor], tree: Any) -> Any:
    """The tree with every tensor changed."""
    if isinstance(tree, torch.Tensor):
        return change(tree)
    if isinstance(tree, Mapping):
        return {key: each(change, value) for key, value in tree.items()}
    if isinstance(tree, list | tuple):
        return tuple(each(change, value) for value in tree)
    return tree


def split(batch: Batch, number: int) -> list[Batch]:
    """The batch in `number` micro-batches of rows as equal as possible, the larger first.

    With fewer rows than that the rest are fillers: the ranks of a mesh must all take the same number of passes.
    """
    if number == 1:
        return [batch]
    num_rows = len(next(tensors(batch.inputs)))
    size, larger = divmod(num_rows, number)
    micros, start = [], 0
    for index in range(number):
        end = start + size + (index < larger)
        is_filler = end == start or batch.count == 0
        micros.append(_rows(batch, slice(start, end) if end > start else slice(0, 1), 0 if is_filler else None))
        start = end
    return micros


def split_padded(batch: Batch, number: int, size: int) -> list[tuple[Batch, int]]:
    """The batch in `number` micro-batches of exactly `size` rows, and how many rows of each are real.

    A pipeline sends activations of one shape. Inputs are filled up with the last row, whose copies the loss must not
    see; targets are not filled up.

    Raises:
        ValueError: the batch has more rows than fit.
    """
    num_rows = len(next(tensors(batch.inputs)))
    if num_rows > number * size:
        raise ValueError(f"a batch of {num_rows} examples does not fit {number} micro-batches of {size}")
    found = []
    for start in range(0, number * size, size):
        end = max(start, min(start + size, num_rows))
        rows = torch.arange(start, start + size).clamp(max=num_rows - 1)
        targets = each(lambda tensor, rows=slice(start, end): tensor[rows], batch.targets)  # type: ignore[misc]
        inputs = each(lambda tensor, rows=rows: tensor[rows.to(tensor.device)], batch.inputs)  # type: ignore[misc]
        found.append((Batch(inputs, targets, 0 if batch.count == 0 or end == start else None), end - start))
    return found


def _rows(batch: Batch, rows: slice, count: int | None) -> Batch:
    return Batch(each(lambda tensor: tensor[rows], batch.inputs), each(lambda t: t[rows], batch.targets), count)
