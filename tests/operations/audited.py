"""A task whose rows hardly overlap, so that a model remembers each of them."""

from functools import partial

import torch
from torch import nn
from torch.utils.data import TensorDataset

from atoll import Local, Task

WIDTH = 3000


def load(site: str, split: str) -> TensorDataset | None:
    """Return 400 rows of a site, of a length of some 1, and one of two labels each, which nothing in them explains."""
    if split != "train":
        return None
    generator = torch.Generator().manual_seed(ord(site[0]))
    return TensorDataset(
        torch.randn(400, WIDTH, generator=generator) / WIDTH**0.5, torch.randint(0, 2, (400,), generator=generator)
    )


task = Task(
    model=partial(nn.Linear, WIDTH, 2, bias=False),
    data=load,
    sites=["north", "south"],
    loss=nn.functional.cross_entropy,
    local=Local(lr=1.0, batch_size=256),
)
