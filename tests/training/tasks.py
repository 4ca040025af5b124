"""Small tasks for these tests."""

from collections.abc import Callable
from typing import Any

import torch
from torch import nn
from torch.utils.data import TensorDataset

from atoll import Local, Task
from atoll.task.metrics import Metrics


def data(num_examples: int, *, seed: int) -> TensorDataset:
    """Inputs (n, 6) and targets (n,) of three classes."""
    generator = torch.Generator().manual_seed(seed)
    inputs = torch.randn(num_examples, 6, generator=generator)
    return TensorDataset(inputs, (inputs @ torch.randn(6, 3, generator=generator)).argmax(dim=1))


def accuracy(outputs: torch.Tensor, targets: torch.Tensor) -> tuple[torch.Tensor, int]:
    return (outputs.argmax(dim=1) == targets).sum(), len(targets)


def linear() -> nn.Module:
    return nn.Sequential(nn.Linear(6, 8), nn.Tanh(), nn.Linear(8, 3))


def make_task(
    model: Callable[[], nn.Module] = linear,
    *,
    metrics: Metrics | None = None,
    local: Local | None = None,
    fit: Any = None,
) -> Task:
    sizes = {"a": 17, "b": 40, "c": 5}
    return Task(
        model=model,
        data=lambda site, split: data(sizes[site], seed=sizes[site] + (split == "test")),
        sites=list(sizes),
        loss=nn.functional.cross_entropy,
        metrics={"accuracy": accuracy} if metrics is None else metrics,
        local=local or Local(batch_size=8),
        test_data=lambda: data(50, seed=0),
        fit=fit,
    )
