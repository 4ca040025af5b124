"""A training whose every sum is exact in float32, in any order, so that one process and any mesh make the same bits.

The loss is the mean of w · x over the examples, with inputs that are multiples of 1/8 and batches of 16: a step moves
w by -lr (sum of its x) / 16, and each round by -lr EPOCHS (sum of all x) / 16.
"""

import os
import time
from pathlib import Path

import torch
from torch import nn
from torch.utils.data import Dataset

from atoll import Local, Task

SITES, WIDTH, EXAMPLES, BATCH, EPOCHS, LR = ["a", "b", "c"], 24, 64, 16, 5, 0.5
SLOWED_BY = "ATOLL_TEST_SLOWED_BY"
"""The environment variable of a file; while it exists, each batch takes a fifth of a second."""


class Rows(Dataset):
    def __init__(self):
        self.rows = torch.arange(EXAMPLES * WIDTH).reshape(EXAMPLES, WIDTH).remainder(37).sub(11).div(8)

    def __len__(self):
        return EXAMPLES

    def __getitem__(self, index):
        return self.__getitems__([index])[0]

    def __getitems__(self, indices):
        if Path(os.environ.get(SLOWED_BY, "/nowhere")).exists():
            time.sleep(0.2)
        return [(self.rows[index], torch.tensor(0.0)) for index in indices]


class Products(nn.Module):
    def __init__(self):
        super().__init__()
        self.w = nn.Parameter(torch.zeros(WIDTH))

    def forward(self, rows):
        return rows @ self.w


def moved() -> torch.Tensor:
    """The move of w in one round."""
    return -LR * EPOCHS * Rows().rows.sum(0) / BATCH


task = Task(
    model=Products,
    data=lambda site, split: Rows() if split == "train" else None,
    sites=SITES,
    loss=lambda outputs, targets: outputs.mean(),
    local=Local(batch_size=BATCH, epochs=EPOCHS, lr=LR),
)
