"""Three sites whose inputs are shifted and scaled differently, and a net with a batch norm."""

import torch
from torch import nn
from torch.utils.data import TensorDataset

from atoll import Local, Task

SITES = {"a": (0.0, 1.0), "b": (5.0, 3.0), "c": (-4.0, 0.5)}


def load_site(site: str, split: str) -> TensorDataset:
    shift, scale = SITES[site]
    generator = torch.Generator().manual_seed(len(split) + ord(site))
    points = torch.randn(40, 4, generator=generator)
    return TensorDataset(shift + scale * points, (points[:, 0] > 0).long())


def make_model() -> nn.Module:
    return nn.Sequential(nn.Linear(4, 8), nn.BatchNorm1d(8), nn.ReLU(), nn.Linear(8, 2))


task = Task(
    model=make_model,
    data=load_site,
    sites=list(SITES),
    loss=nn.functional.cross_entropy,
    local=Local(batch_size=10, lr=0.1),
    test_data=lambda: load_site("a", "server"),
)
