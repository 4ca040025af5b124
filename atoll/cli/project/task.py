"""A task: a small network learns handwritten digits from the data of three sites.

The coordinator and every agent load this file, each on its machine: no code is sent. Replace the data and the model
by your own; `test_task.py` checks that the task still learns.
"""

from pathlib import Path

import numpy as np
import torch
from torch import nn
from torch.utils.data import TensorDataset

from atoll import Local, Task

SITES = ["north", "south", "east"]
DIGITS = Path(__file__).with_name("digits.csv.gz")
"""A line for each image: its 64 pixels, from 0 to 16, and the digit that it shows."""


def examples(first: int, step: int) -> TensorDataset:
    """Return every `step`-th image from number `first` on, with the digit that it shows."""
    digits = np.loadtxt(DIGITS, delimiter=",")[first::step]
    images = torch.from_numpy(digits[:, :-1] / 16).float()
    return TensorDataset(images, torch.from_numpy(digits[:, -1].astype(int)))


def load_site(site: str, split: str) -> TensorDataset | None:
    """Return the training data of one site; None for its test data, as no site holds any back."""
    return examples(SITES.index(site), len(SITES) + 1) if split == "train" else None


def load_test() -> TensorDataset:
    """Return the images that no site has; the coordinator evaluates every version on them."""
    return examples(len(SITES), len(SITES) + 1)


def make_model() -> nn.Module:
    """Return a small network: 64 pixels in, 10 digits out."""
    return nn.Sequential(nn.Linear(64, 64), nn.ReLU(), nn.Linear(64, 10))


def accuracy(outputs: torch.Tensor, targets: torch.Tensor) -> tuple[torch.Tensor, int]:
    """Return the numbers of correct outputs and of all: sums, which add up exactly over batches and sites."""
    return (outputs.argmax(dim=1) == targets).sum(), len(targets)


task = Task(
    model=make_model,
    data=load_site,
    sites=SITES,
    loss=nn.functional.cross_entropy,
    metrics={"accuracy": accuracy},
    local=Local(epochs=1, batch_size=16, lr=0.1),
    test_data=load_test,
)
