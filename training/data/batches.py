"""The examples of each step and their collation, for any map-style data set of (inputs, targets)."""

from bisect import bisect_right
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import torch
from torch.nn.modules.batchnorm import _BatchNorm
from torch.utils.data import ConcatDataset, Subset, TensorDataset, default_collate

from atoll.task.collated import Collated, collate_of
from atoll.task.errors import TaskBroken
from atoll.training.data.trees import map_tensors

Fetch = Callable[[torch.Tensor], Any]
"""Indices (B,) int64 -> the collated batch (inputs, targets)."""


ROW, WAY_OUT = "(inputs, targets)", "Task(collate=...) makes such batches of rows of any form"


def batch_sizes(num_examples: int, batch_size: int | None, *, model: torch.nn.Module) -> list[int]:
    """Return the sizes of one epoch's batches; a short last batch is kept.

    One exception: BatchNorm cannot normalize a batch of one example. If the model has such a layer and the last batch
    would have one example, that example joins the batch before it.
    """
    size = num_examples if batch_size is None else batch_size
    sizes = [min(size, num_examples - start) for start in range(0, num_examples, size)]
    if len(sizes) > 1 and sizes[-1] == 1 < sizes[-2] and any(isinstance(m, _BatchNorm) for m in model.modules()):
        sizes[-2:] = [sizes[-2] + 1]
    return sizes


def epoch(num_examples: int, sizes: list[int], generator: torch.Generator | None) -> Iterator[torch.Tensor]:
    """Yield the indices of each batch of one epoch, in a new order if there is a generator."""
    order = torch.arange(num_examples) if generator is None else torch.randperm(num_examples, generator=generator)
    yield from torch.split(order, sizes)


def fetcher(dataset: Any) -> Fetch:
    """Return the function that fetches a batch: by one index operation from tensors, else example by example."""
    collate = _checked(collate_of(dataset) or default_collate)
    if type(dataset) is Subset:
        inner, chosen = fetcher(dataset.dataset), torch.as_tensor(dataset.indices)
        return lambda indices: inner(chosen[indices])
    if type(dataset) is TensorDataset:
        pair_of(dataset.tensors)
        return lambda indices: tuple(tensor[indices] for tensor in dataset.tensors)
    return lambda indices: collate(rows_at(dataset, indices.tolist()))


def _nothing(_index: int) -> None:
    pass


def rows_at(dataset: Any, indices: list[int], begin: Callable[[int], object] = _nothing) -> Any:
    """Return rows of a data set by their indices.

    A data set that reads many at once (`__getitems__`) gets all of them in one call, as by torch's DataLoader, which
    then reads no single row.

    Args:
        dataset: map-style; also a `Subset` or a `ConcatDataset` of such ones, which are looked into.
        indices: the indices of the rows.
        begin: called with the number of a row before it is read, or with the first of those that are read at once.
    """
    return _rows_at(dataset, indices, indices, begin)


def row_at(dataset: Any, index: int) -> Any:
    """Return one row by its index, also of a data set that makes many rows at once."""
    rows = rows_at(dataset, [index])
    return rows[0] if isinstance(rows, list | tuple) and len(rows) == 1 else rows


def reads_together(dataset: Any) -> bool:
    """Return whether a data set reads many rows at once; a `Subset` does if its data set does."""
    while type(dataset) is Subset or isinstance(dataset, Collated):
        dataset = dataset.dataset
    return hasattr(dataset, "__getitems__")


def _rows_at(dataset: Any, indices: Sequence[Any], numbers: Sequence[int], begin: Callable[[int], object]) -> Any:
    """Return rows as `rows_at`; `numbers` are the rows' indices in the outer data set, for `begin`."""
    if isinstance(dataset, Collated):
        return _rows_at(dataset.dataset, indices, numbers, begin)
    if type(dataset) is Subset:
        return _rows_at(dataset.dataset, [dataset.indices[index] for index in indices], numbers, begin)
    if type(dataset) is ConcatDataset:
        return _rows_of_parts(dataset, indices, numbers, begin)
    if hasattr(dataset, "__getitems__"):
        begin(numbers[0] if numbers else -1)
        return dataset.__getitems__(list(indices))
    if begin is _nothing:
        return [dataset[index] for index in indices]
    rows = []
    for index, number in zip(indices, numbers, strict=True):
        begin(number)
        rows.append(dataset[index])
    return rows


def _rows_of_parts(
    whole: "ConcatDataset[Any]", indices: Sequence[int], numbers: Sequence[int], begin: Callable[[int], object]
) -> Any:
    """Return rows of a `ConcatDataset`; each of its data sets reads its rows at once, if it can."""
    ends = whole.cumulative_sizes
    of = [bisect_right(ends, index) for index in indices]
    rows: dict[int, Any] = {}
    for place, part in enumerate(of):
        if place in rows:
            continue
        dataset, start = whole.datasets[part], ends[part - 1] if part else 0
        together = reads_together(dataset)
        places = [other for other, its in enumerate(of) if its == part] if together else [place]
        found = _rows_at(dataset, [indices[p] - start for p in places], [numbers[p] for p in places], begin)
        if len(places) == len(of):
            return found  # perhaps no list, but an input of the task's collation
        if not isinstance(found, list | tuple) or len(found) != len(places):
            found = [dataset[indices[p] - start] for p in places]
        rows |= dict(zip(places, found, strict=True))
    return [rows[place] for place in range(len(of))]


def pair_of(batch: Any) -> Any:
    """Check that a batch is a pair (inputs, targets), and return it.

    Raises:
        TaskBroken: the batch is no pair.
    """
    if isinstance(batch, tuple | list) and len(batch) == 2:
        return batch
    keys = f" with the keys {', '.join(map(str, batch))}" if isinstance(batch, Mapping) else ""
    length = f" of {len(batch)}" if isinstance(batch, tuple | list) else ""
    raise TaskBroken(f"a row must be a pair {ROW}, got {type(batch).__name__}{length}{keys} ({WAY_OUT})")


def _checked(collate: Callable[[list[Any]], Any]) -> Callable[[list[Any]], Any]:
    def checked(rows: list[Any]) -> Any:
        try:
            batch = collate(rows)
        except (RuntimeError, TypeError) as error:
            if collate is not default_collate:
                raise
            raise TaskBroken(f"rows must be pairs {ROW} of equal shapes: {error} ({WAY_OUT})") from error
        return pair_of(batch)

    return checked


def to_device(batch: Any, device: torch.device | str) -> Any:
    """Return the batch with all its tensors on the device."""
    return map_tensors(lambda tensor: tensor.to(device), batch)
