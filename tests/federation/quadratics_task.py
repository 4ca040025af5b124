"""Two quadratics whose rounds are known by hand: f_i(x) = (a_i / 2) (x - c_i)^2, a = (1, 3), c = (0, 4), from x = 10.

Site "a" has two examples and "b" ten, all alike: with batches of one they take 2 and 10 steps in an epoch.
"""

import torch
from torch import nn
from torch.utils.data import TensorDataset

from atoll import Local, Task

CURVES = {"a": (1.0, 0.0, 2), "b": (3.0, 4.0, 10)}


class Point(nn.Module):
    """x, and two buffers that count the training's steps: one of floats, one of integers."""

    def __init__(self) -> None:
        super().__init__()
        self.x = nn.Parameter(torch.tensor([10.0]))
        self.register_buffer("seen", torch.zeros(1))
        self.register_buffer("count", torch.zeros((), dtype=torch.int64))

    def forward(self, slopes: torch.Tensor) -> torch.Tensor:
        if self.training:
            self.seen += 1
            self.count += 1
        return torch.stack([self.x.expand_as(slopes), slopes])


def load_site(site: str, split: str) -> TensorDataset:
    slope, centre, num_examples = CURVES[site]
    return TensorDataset(torch.full((num_examples,), slope), torch.full((num_examples,), centre))


def loss(outputs: torch.Tensor, centres: torch.Tensor) -> torch.Tensor:
    x, slopes = outputs
    return (slopes / 2 * (x - centres) ** 2).mean()


task = Task(
    model=Point,
    data=load_site,
    sites=list(CURVES),
    loss=loss,
    local=Local(batch_size=1, lr=0.1, shuffle=False),
    test_data=lambda: load_site("a", "test"),
)
