"""The examples of each step and their collation, for any map-style data set of (inputs, targets)."""

from collections.abc import Callable, Iterator, Mapping
from typing import Any

import torch
from torch.nn.modules.batchnorm import _BatchNorm
from torch.utils.data import Subset, TensorDataset, default_collate

from atoll.parallel.local_training.trees import map_tensors
from atoll.parallel.task.collated import collate_of
from atoll.parallel.task.errors import TaskBroken

Fetch = Callable[[torch.Tensor], Any]
"""Indices (B,) int64 -> the collated batch (inputs, targets)."""


ROW, WAY_OUT = "(inputs, targets)", "Task(collate=...) makes such batches of rows of any form"


def batch_sizes(num_examples: int, batch_size: int | None, *, model: torch.nn.Module) -> list[int]:
    """Return the sizes of one epoch's batches; a short last batch is kept.

    One exception: BatchNorm cannot normalize a batch of one example. If the model has such a layer and the last batch
    would be of one, that example joins the batch before it.
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
    if hasattr(dataset, "__getitems__"):
        return lambda indices: collate(dataset.__getitems__(indices.tolist()))
    return lambda indices: collate([dataset[index] for index in indices.tolist()])


def pair_of(batch: Any) -> Any:
    """Return a batch if it is a pair.

    Raises:
        TaskBroken: it is none.
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
