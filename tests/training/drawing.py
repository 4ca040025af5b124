"""Data sets that draw random numbers, and the numbers that they must draw."""

import os
import random
from collections.abc import Iterator
from hashlib import blake2b
from typing import Any

import numpy as np
import torch
from torch import nn
from torch.utils.data import Dataset

from atoll import Local, Task


class Noisy(Dataset[Any]):
    """Examples (index, draws of torch, numpy and Python); inputs and targets are the same."""

    def __init__(self, size: int = 24, first: int = 0) -> None:
        self.size, self.first = size, first

    def __len__(self) -> int:
        return self.size

    def __getitem__(self, index: int) -> tuple[torch.Tensor, torch.Tensor]:
        if index < self.first:
            return torch.tensor([index, 0, 0, 0.0]), torch.tensor([index, 0, 0, 0.0])
        row = torch.tensor([index, torch.rand(()).item(), np.random.rand(), random.random()])
        return row, row.clone()


class Together(Noisy):
    """The same, read many at once."""

    def __getitems__(self, indices: list[int]) -> list[Any]:
        return [self[index] for index in indices]


class Unequal(Noisy):
    """Examples that differ from one reading to the next."""

    def __getitem__(self, index: int) -> tuple[torch.Tensor, torch.Tensor]:
        row = torch.tensor(list(os.urandom(4))).float()
        return row, row


def expected(seed: int, epoch: int, index: int) -> list[float]:
    """Return the row of an example by the rule of the documentation, with generators of its own."""
    words = blake2b(f"{seed} {epoch} {index}".encode(), digest_size=16).digest()
    first, second = (int.from_bytes(words[at : at + 4], "little") for at in (0, 4))
    of_torch = torch.rand((), generator=torch.Generator().manual_seed(first)).item()
    of_numpy, of_python = np.random.RandomState(second).rand(), random.Random(int.from_bytes(words[8:], "little"))
    return torch.tensor([float(index), of_torch, of_numpy, of_python.random()]).tolist()


def stream(_epoch: int) -> Iterator[Any]:
    """Yield the examples of `Noisy` as a generator that draws."""
    yield from (Noisy()[index] for index in range(24))


class Residual(nn.Module):
    """x + W dropout(x), with W = 0 at the start: the identity, which draws random numbers in training."""

    def __init__(self, p: float = 0.5) -> None:
        super().__init__()
        self.linear, self.dropout = nn.Linear(4, 4), nn.Dropout(p)
        nn.init.zeros_(self.linear.weight)
        nn.init.zeros_(self.linear.bias)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + self.linear(self.dropout(x))


def data(_site: str, split: str) -> Any:
    return Noisy() if split == "train" else Noisy(6)


def unequal(_site: str, split: str) -> Any:
    return Unequal() if split == "train" else None


def built_at_random(_site: str, split: str) -> Any:
    inputs = torch.rand(24 if split == "train" else 6, 4)
    return torch.utils.data.TensorDataset(inputs, inputs.clone())


def two_stages() -> nn.Module:
    return nn.Sequential(Residual(), Residual(0.0))


LOCAL = Local(batch_size=8, lr=1e-6)
task = Task(model=two_stages, data=data, sites=["north"], loss=nn.functional.mse_loss, local=LOCAL)
unequal_task = Task(model=two_stages, data=unequal, sites=["north"], loss=nn.functional.mse_loss, local=LOCAL)
random_task = Task(model=two_stages, data=built_at_random, sites=["north"], loss=nn.functional.mse_loss, local=LOCAL)
