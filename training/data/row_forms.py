"""The forms of rows and batches in words: the dtypes and shapes of their tensors, the types of everything else."""

from collections.abc import Callable, Iterable, Mapping
from typing import Any

import numpy as np
import torch
from torch.utils.data import ConcatDataset, Subset, TensorDataset

from atoll.ground.printable import count_of, some_of
from atoll.task.collated import Collated
from atoll.training.data.batches import row_at
from atoll.training.data.trees import children

LISTED_MAX = 4
"""Largest number of parts of a tree that a sentence names."""


def form_of(tree: Any) -> str:
    """Describe inputs, targets or outputs by dtype and shape, such as `float64 [8, 20]`."""
    return _form(tree, lambda tensor: f"{_dtype(tensor)} {list(tensor.shape)}")


def kind_of(dataset: Any, *, reads: bool) -> str:
    """Describe a data set's first row by dtypes and shapes, such as `float32 [20], int64 []`; empty if unknown.

    Rows that are read one by one have dtypes and numbers of dimensions only: sizes may differ from row to row.

    Args:
        dataset: map-style, with an example.
        reads: read a row, if its form is unknown otherwise.
    """
    if isinstance(dataset, Collated):
        return kind_of(dataset.dataset, reads=reads)
    if type(dataset) is Subset:
        return kind_of(dataset.dataset, reads=False) or (_of_row(dataset) if reads else "")
    if type(dataset) is ConcatDataset:
        return _one({kind_of(part, reads=False) for part in dataset.datasets}) or (_of_row(dataset) if reads else "")
    if type(dataset) is TensorDataset:
        return ", ".join(f"{_dtype(tensor)} {list(tensor.shape[1:])}" for tensor in dataset.tensors)
    return _of_row(dataset) if reads else ""


def _one(kinds: Iterable[str]) -> str:
    first, *others = kinds
    return "" if others else first


def _of_row(dataset: Any) -> str:
    return _form(row_at(dataset, 0), lambda tensor: f"{_dtype(tensor)} of {count_of(tensor.ndim, 'dimension')}")


def _form(tree: Any, of_tensor: Callable[[Any], str]) -> str:
    if isinstance(tree, torch.Tensor | np.ndarray):
        return of_tensor(tree)
    if (parts := children(tree)) is None:
        return type(tree).__name__
    forms = {key: _form(part, of_tensor) for key, part in parts.items()}
    if isinstance(tree, Mapping):
        return f"{{{some_of((f'{key}: {form}' for key, form in forms.items()), LISTED_MAX)}}}"
    if len(forms) > 1 and len(set(forms.values())) == 1:
        return f"a {type(tree).__name__} of {len(forms)} {next(iter(forms.values()))}"
    return f"({some_of(forms.values(), LISTED_MAX)})"


def _dtype(tensor: Any) -> str:
    return str(tensor.dtype).removeprefix("torch.")
