"""A training whose gradients are exact in float32, in any order, of layers that a mesh can divide along every axis.

The loss is linear in the weights, so that a gradient is a sum of the inputs alone: multiples of 1/2048 below 2^24 of
them. SGD rounds each element by itself. So one process and any mesh make the same bits, from whatever version.
"""

import torch
from torch import nn
from torch.utils.data import Dataset

from atoll import Local, Task
from atoll.parallel.engine.blueprint import Blueprint

SITES, WIDTH, OUT, EXAMPLES, BATCH = ["a", "b", "c"], 24, 16, 56, 16


class Rows(Dataset):
    def __init__(self, site):
        rows = torch.arange(EXAMPLES * WIDTH).reshape(EXAMPLES, WIDTH)
        self.rows = (rows * (3 + SITES.index(site))).remainder(37).sub(11).div(8)

    def __len__(self):
        return EXAMPLES  # the last batch has 8, also a power of two

    def __getitem__(self, index):
        return self.rows[index], torch.tensor(1.0)


class Gain(nn.Module):
    def __init__(self):
        super().__init__()
        self.w = nn.Parameter(torch.rand(WIDTH))
        self.register_buffer("calls", torch.zeros((), dtype=torch.int64))

    def forward(self, rows):
        return rows @ self.w


class Layers(nn.Module):
    def __init__(self):
        super().__init__()
        self.column, self.row = nn.Linear(WIDTH, OUT), nn.Linear(WIDTH, OUT)
        self.gain = Gain()

    @property
    def blueprint(self):
        return Blueprint(tensor=styles)

    def forward(self, rows):
        weights = torch.arange(OUT) - 5.0
        return (self.column(rows) - self.row(rows)) @ weights + self.gain(rows)


def styles(_sequence_parallel, _loss_parallel):
    from torch.distributed.tensor import Replicate
    from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel

    both = {"output_layouts": Replicate()}
    return {"column": ColwiseParallel(**both), "row": RowwiseParallel(input_layouts=Replicate(), **both)}


task = Task(
    model=Layers,
    data=lambda site, split: Rows(site) if split == "train" else None,
    sites=SITES,
    loss=lambda outputs, targets: (outputs * targets).mean(),
    local=Local(batch_size=BATCH, epochs=2, lr=0.5),
)
