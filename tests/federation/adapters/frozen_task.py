"""A model whose first layer is frozen and drawn by the seed of the run: only its head travels."""

import torch
from torch import nn
from torch.utils.data import TensorDataset

from atoll import Local, Task

SITES = ("north", "south", "east")
STD = 0.3


def model() -> nn.Module:
    layers = nn.Sequential(nn.Linear(4, 8), nn.Tanh(), nn.Linear(8, 2))
    nn.init.normal_(layers[0].weight, std=STD)
    layers[0].requires_grad_(False)
    return layers


def load_site(site: str, split: str) -> TensorDataset:
    return examples(SITES.index(site) + 10 * (split == "test"))


def examples(seed: int) -> TensorDataset:
    generator = torch.Generator().manual_seed(seed)
    inputs = torch.randn(40, 4, generator=generator)
    return TensorDataset(inputs, (inputs[:, 0] > inputs[:, 1]).long())


task = Task(
    model=model,
    data=load_site,
    loss=nn.functional.cross_entropy,
    sites=SITES,
    local=Local(batch_size=8, lr=0.2),
    test_data=lambda: examples(99),
    travels="trained",
)
