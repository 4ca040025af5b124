"""A linear model with 20,000 values: enough to measure the noise of one version."""

import torch
from torch import nn
from torch.utils.data import TensorDataset

from atoll.task.local import Local
from atoll.task.task import Task


def _data(_site: str, split: str) -> TensorDataset | None:
    return TensorDataset(torch.ones(16, 2000), torch.zeros(16, dtype=torch.long)) if split == "train" else None


task = Task(
    model=lambda: nn.Linear(2000, 10, bias=False),
    data=_data,
    sites=["a", "b", "c", "d"],
    loss=nn.functional.cross_entropy,
    local=Local(epochs=1, max_steps=1, batch_size=4, lr=0.1),
)
