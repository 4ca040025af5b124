"""A wide linear task whose rows hardly move it: what a version has moved by is noise."""

import torch
from torch import nn
from torch.utils.data import TensorDataset

from atoll import Local, Task

SITES, WIDTH, ROWS = tuple("abcde"), 50_000, 8


def rows(site: str, split: str) -> TensorDataset:
    """Return rows of one number that is not zero."""
    inputs = torch.zeros(ROWS, WIDTH)
    inputs[:, SITES.index(site)] = 1e-3 * (1 + torch.arange(ROWS))
    return TensorDataset(inputs, torch.ones(ROWS, 1))


def squares(outputs: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
    """Return the mean square."""
    return (outputs - targets).square().mean()


def model() -> nn.Module:
    """Return a layer that starts at zero."""
    layer = nn.Linear(WIDTH, 1, bias=False)
    nn.init.zeros_(layer.weight)
    return layer


task = Task(
    model=model,
    data=rows,
    sites=SITES,
    loss=squares,
    local=Local(optimizer="adamw", lr=0.5, weight_decay=0.1, epochs=9),
)
