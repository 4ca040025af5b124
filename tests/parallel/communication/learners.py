"""The models that the tests of this folder train: digits on a small net, and two quadratics."""

from collections.abc import Iterator
from functools import cache

import torch
from torch import nn


@cache
def digits() -> tuple[torch.Tensor, torch.Tensor]:
    """All 1,797 images (n, 64) in [0, 1], in a fixed random order, and what they show."""
    from sklearn.datasets import load_digits

    data = load_digits()
    order = torch.randperm(len(data.target), generator=torch.Generator().manual_seed(0))
    return torch.from_numpy(data.data / 16).float()[order], torch.from_numpy(data.target)[order]


def make_net(width: int = 64) -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(64, width), nn.ReLU(), nn.Linear(width, 10))


def batches(rank: int, num_ranks: int, *, steps: int, size: int) -> Iterator[tuple[torch.Tensor, torch.Tensor]]:
    """Yield one rank's share of each step's examples, drawn with a fixed seed."""
    images, targets = digits()
    generator = torch.Generator().manual_seed(1)
    for _ in range(steps):
        chosen = torch.randint(len(targets), (size,), generator=generator)[rank::num_ranks]
        yield images[chosen], targets[chosen]


def loss_on_all(model: nn.Module) -> float:
    images, targets = digits()
    with torch.no_grad():
        return nn.functional.cross_entropy(model(images), targets).item()


class Quadratic(nn.Module):
    """(a/2) (x - c)² with a = 1, c = 0 on rank 0 and a = 3, c = 4 on rank 1."""

    def __init__(self, rank: int, start: float = 10.0) -> None:
        super().__init__()
        self.x = nn.Parameter(torch.tensor([start], dtype=torch.float64))
        self.a, self.c = ((1.0, 0.0), (3.0, 4.0))[rank]

    def forward(self) -> torch.Tensor:
        return self.a / 2 * (self.x - self.c).square().sum()
