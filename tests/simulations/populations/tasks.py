"""Tasks whose data the tests deal: the digits of one site, and small synthetic data."""

from collections.abc import Callable, Mapping
from functools import cache
from typing import Any

import numpy as np
import torch
from torch import nn
from torch.utils.data import Dataset, TensorDataset

from atoll import Task


def task_of(data: Callable[[str, str], Any] | Mapping[str, Any], sites: list[str] | None = None) -> Task:
    """A task over these data: a function, or training sets by site."""
    load = data if callable(data) else lambda site, split: data[site] if split == "train" else None
    there = sites if sites is not None else ["all"] if callable(data) else list(data)
    return Task(model=lambda: nn.Linear(64, 10), data=load, sites=there, loss=nn.functional.cross_entropy)


def labelled(labels: "np.ndarray[Any, Any] | list[int]") -> TensorDataset:
    """Examples whose input is their own place."""
    targets = torch.as_tensor(np.asarray(labels, np.int64))
    return TensorDataset(torch.arange(len(targets), dtype=torch.float32)[:, None], targets)


def places(dataset: Any) -> list[int]:
    """Return the places of examples in the data of `labelled`."""
    return [int(dataset[k][0].item()) for k in range(len(dataset))]


class Listed(Dataset[Any]):
    """A map-style data set without an attribute `targets` that counts its reads."""

    def __init__(self, items: list[Any]) -> None:
        self.items, self.reads = items, 0

    def __len__(self) -> int:
        return len(self.items)

    def __getitem__(self, index: int) -> Any:
        self.reads += 1
        return self.items[index]


@cache
def digits() -> tuple[TensorDataset, TensorDataset]:
    """scikit-learn's digits: 1,437 to train and 360 to test on, shuffled once."""
    from sklearn.datasets import load_digits

    bunch = load_digits()
    order = np.random.default_rng(0).permutation(1797)
    images, targets = torch.from_numpy(bunch.data / 16).float()[order], torch.from_numpy(bunch.target)[order]
    return TensorDataset(images[:1437], targets[:1437]), TensorDataset(images[1437:], targets[1437:])


digits_task = task_of(lambda site, split: digits()[split == "test"])
