"""The pool: several map-style data sets of (inputs, targets) as one, with its labels."""

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from functools import cached_property
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch.utils.data import ConcatDataset, Subset, TensorDataset

from atoll.simulations.populations.partitions import Ints
from atoll.training.data.batches import row_at


class NoLabels(ValueError):
    """Error: targets are not class labels; the message says what they are."""


class Pool:
    """Examples of several data sets, one after the other.

    Args:
        datasets: the data sets of the sites that have this split.
        names: the name of each in the note on a failed read; empty: no note.
    """

    def __init__(self, datasets: Sequence[Any], names: Sequence[str] = ()) -> None:
        self.datasets, self.names = tuple(datasets), tuple(names) or ("",) * len(datasets)
        self.sizes = np.array([len(dataset) for dataset in self.datasets], np.int64)

    def __len__(self) -> int:
        return int(self.sizes.sum())

    @cached_property
    def labels(self) -> Ints:
        """The class of each example (N,), read once.

        Raises:
            NoLabels: a target is not one whole number.
        """
        found = []
        for dataset, name in zip(self.datasets, self.names, strict=True):
            with reading(name):
                found += [labels_of(dataset)] if len(dataset) else []
        return np.concatenate(found) if found else np.empty(0, np.int64)

    def part(self, indices: Ints) -> "Subset[Any]":
        """Return a view of some examples.

        `fetcher` reads a batch of it by one index operation if the data sets are tensors or parts of one data set.
        """
        base, chosen = self._joined
        return Subset(base, (indices if chosen is None else chosen[indices]).tolist())

    @cached_property
    def _joined(self) -> tuple[Any, Ints | None]:
        """One data set, and the indices of the pool's examples in it; None: all, in order."""
        if len(self.datasets) == 1 and type(self.datasets[0]) is not Subset:
            return self.datasets[0], None
        if all(type(one) is Subset and one.dataset is self.datasets[0].dataset for one in self.datasets):
            indices = [np.asarray(one.indices, np.int64) for one in self.datasets]
            return self.datasets[0].dataset, np.concatenate(indices)
        tensors = [_tensors_of(one) for one in self.datasets]
        if len({tuple((t.dtype, t.shape[1:]) for t in those) for those in tensors}) == 1 and tensors[0]:
            return TensorDataset(*map(torch.cat, zip(*tensors, strict=True))), None
        return ConcatDataset(self.datasets), None


@contextmanager
def reading(name: str) -> Iterator[None]:
    """Add the name of the data to a read error: the data of many sites pass the same line of the task."""
    try:
        yield
    except Exception as error:
        if name:
            error.add_note(f"in the {name}")
        raise


def _tensors_of(dataset: Any) -> tuple[torch.Tensor, ...]:
    """Return the tensors of a data set; an empty tuple if it does not consist of tensors."""
    if type(dataset) is TensorDataset:
        return dataset.tensors
    if type(dataset) is Subset:
        chosen = torch.as_tensor(dataset.indices)
        return tuple(tensor[chosen] for tensor in _tensors_of(dataset.dataset))
    return ()


def labels_of(dataset: Any) -> Ints:
    """Return the class of each example (n,), int64, without reading the inputs if the data set shows its targets.

    Raises:
        NoLabels: a target is not one whole number, or an item is not (inputs, target).
    """
    return _as_labels(_targets(dataset, np.arange(len(dataset))))


def _targets(dataset: Any, indices: Ints) -> NDArray[Any]:
    if type(dataset) is Subset:
        return _targets(dataset.dataset, np.asarray(dataset.indices, np.int64)[indices])
    if type(dataset) is ConcatDataset:
        return _targets_of_row(dataset, indices)
    if type(dataset) is TensorDataset and len(dataset.tensors) == 2:
        return np.asarray(dataset.tensors[1].numpy()[indices])
    if _shows_targets(dataset):
        return np.asarray(dataset.targets)[indices]
    return _stacked([_target(dataset, int(index)) for index in indices])


def _targets_of_row(dataset: "ConcatDataset[Any]", indices: Ints) -> NDArray[Any]:
    ends = np.array(dataset.cumulative_sizes)
    of = np.searchsorted(ends, indices, side="right")
    found = [
        _targets(dataset.datasets[k], indices[of == k] - (ends[k - 1] if k else 0)) for k in np.unique(of).tolist()
    ]
    in_order: NDArray[Any] = np.concatenate(found)[np.argsort(np.argsort(of, kind="stable"))]
    return in_order


def _shows_targets(dataset: Any) -> bool:
    """Check that `.targets` are the targets of the items, as in torchvision, and not untransformed ones."""
    shown = getattr(dataset, "targets", None)
    if shown is None or not hasattr(shown, "__len__") or len(shown) != len(dataset) or not len(dataset):
        return False
    if getattr(dataset, "target_transform", None) is not None:
        return False
    first, item = np.asarray(shown[0]), np.asarray(_target(dataset, 0))
    return first.shape == item.shape and bool((first == item).all())


def _target(dataset: Any, index: int) -> Any:
    item = row_at(dataset, index)
    if not isinstance(item, tuple | list) or len(item) != 2:
        raise NoLabels(f"example {index} is {type(item).__name__}, and must be (inputs, target)")
    return item[1]


def _stacked(targets: list[Any]) -> NDArray[Any]:
    try:
        return np.stack([np.asarray(target) for target in targets])
    except (TypeError, ValueError) as error:
        raise NoLabels(f"the targets differ in shape or kind ({error})") from error


def _as_labels(targets: NDArray[Any]) -> Ints:
    if targets.ndim != 1 or targets.dtype.kind not in "iub":
        each = f"of shape {tuple(targets.shape[1:])}" if targets.ndim > 1 else "each"
        raise NoLabels(f"a target is {targets.dtype} {each}, and a class label is one whole number")
    return targets.astype(np.int64)
