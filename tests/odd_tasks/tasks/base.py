"""The rows that most odd tasks train on, and the plain task that they vary."""

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import torch
from torch import nn
from torch.utils.data import TensorDataset

from atoll import Local, Task

SITES = {"a": 6, "b": 8, "c": 10}
"""The number of rows of each site; the pooled rows can be halved."""

FEATURES, CLASSES = 6, 3
LOCAL = Local(epochs=2, batch_size=None, lr=0.1)
"""Whole data sets as batches: no order of the rows has to be known."""

IN_ORDER = replace(LOCAL, shuffle=False)
"""For a model on which it depends which rows are in one forward pass."""


def columns(site: str) -> tuple[torch.Tensor, torch.Tensor]:
    """Return the inputs (n, 6) and classes (n,) of a site, each of which is there."""
    generator = torch.Generator().manual_seed(1000 + ord(site))
    inputs = torch.randn(SITES[site], FEATURES, generator=generator)
    return inputs, (inputs[:, 0].abs() * 2).long().remainder(CLASSES)


def rows(site: str, split: str) -> TensorDataset | None:
    return TensorDataset(*columns(site)) if split == "train" else None


def layers() -> nn.Sequential:
    return nn.Sequential(nn.Linear(FEATURES, 8), nn.Tanh(), nn.Linear(8, CLASSES))


plain = Task(model=layers, data=rows, loss=nn.functional.cross_entropy, sites=list(SITES), local=LOCAL)


def of_model(model: Callable[[], nn.Module], **changes: Any) -> Task:
    return replace(plain, model=model, **changes)


def of_rows(make: Callable[[torch.Tensor, torch.Tensor], Any], **changes: Any) -> Task:
    """Return the plain task on a site's rows in another form."""
    return replace(plain, data=lambda site, split: make(*columns(site)) if split == "train" else None, **changes)
