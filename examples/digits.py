"""Handwritten digits at five sites with unequal shares of each digit: the task of the demo.

The data is scikit-learn's digits (1,797 images of 8 x 8 pixels, shipped with the library). A fifth of each digit is the
server's test set; the rest is split among five sites, each digit by a Dirichlet draw with α = 0.5, and each site holds
back a tenth of its examples as a test split. The split is the same on every machine.

    atoll coordinator examples/digits.toml
    atoll agent examples/digits.py:task --site north --join CODE      # and the same at the other four sites

To make a site a straggler, start its agent with the environment variable ATOLL_DEMO_SLOW_S=0.5: every batch then takes
half a second to read, as from a slow disk.
"""

import os
import time
from functools import cache

import numpy as np
import torch
from sklearn.datasets import load_digits
from torch import nn
from torch.utils.data import Dataset, TensorDataset

from atoll import Local, Task

SITES = ["north", "south", "east", "west", "harbor"]
ALPHA = 0.5
SEED = 20

Split = tuple[torch.Tensor, torch.Tensor]


class SlowDisk(Dataset[Split]):
    """Examples from a slow disk, which takes `delay_s` seconds for each batch."""

    def __init__(self, images: torch.Tensor, digits: torch.Tensor, *, delay_s: float) -> None:
        self.images, self.digits, self.delay_s = images, digits, delay_s

    def __len__(self) -> int:
        return len(self.digits)

    def __getitem__(self, index: int) -> Split:
        return self.__getitems__([index])[0]

    def __getitems__(self, indices: list[int]) -> list[Split]:
        time.sleep(self.delay_s)
        return [(self.images[index], self.digits[index]) for index in indices]


@cache
def owners() -> dict[str, np.ndarray]:
    """Return the indices of the examples of each site; those of "server" are the test set."""
    rng = np.random.default_rng(SEED)
    digits = load_digits().target
    shares: dict[str, list[np.ndarray]] = {name: [] for name in ["server", *SITES]}
    for digit in range(10):
        examples = rng.permutation(np.flatnonzero(digits == digit))
        held_out = len(examples) // 5
        cuts = np.cumsum(rng.dirichlet([ALPHA] * len(SITES)))[:-1] * (len(examples) - held_out)
        parts = np.split(examples[held_out:], cuts.round().astype(int))
        for name, part in zip(["server", *SITES], [examples[:held_out], *parts], strict=True):
            shares[name].append(part)
    return {name: rng.permutation(np.concatenate(parts)) for name, parts in shares.items()}


def examples(indices: np.ndarray) -> Split:
    """Return images (n, 1, 8, 8) in [0, 1], and the digits (n,) that they show."""
    digits = load_digits()
    images = torch.from_numpy(digits.images[indices, np.newaxis] / 16).float()
    return images, torch.from_numpy(digits.target[indices])


def load_site(site: str, split: str) -> SlowDisk | TensorDataset:
    """Return a split of a site's data; a tenth of it is the test split."""
    indices = owners()[site]
    num_test = len(indices) // 10
    images, targets = examples(indices[:num_test] if split == "test" else indices[num_test:])
    delay_s = float(os.environ.get("ATOLL_DEMO_SLOW_S", "0"))
    if delay_s > 0 and split == "train":
        return SlowDisk(images, targets, delay_s=delay_s)
    return TensorDataset(images, targets)


def load_test() -> TensorDataset:
    """Return the server's test set."""
    return TensorDataset(*examples(owners()["server"]))


def make_model() -> nn.Module:
    """Return a convolutional net of 283,786 parameters, whose 1.1 MB take a noticeable time on a slow line."""
    return nn.Sequential(
        nn.Conv2d(1, 32, kernel_size=3, padding=1),
        nn.ReLU(),
        nn.Conv2d(32, 64, kernel_size=3, padding=1),
        nn.ReLU(),
        nn.MaxPool2d(2),
        nn.Flatten(),
        nn.Linear(64 * 4 * 4, 256),
        nn.ReLU(),
        nn.Linear(256, 10),
    )


def accuracy(outputs: torch.Tensor, targets: torch.Tensor) -> tuple[torch.Tensor, int]:
    """Return the numbers of correct outputs and of all."""
    return (outputs.argmax(dim=1) == targets).sum(), len(targets)


task = Task(
    model=make_model,
    data=load_site,
    sites=SITES,
    loss=nn.functional.cross_entropy,
    metrics={"accuracy": accuracy},
    local=Local(epochs=2, batch_size=16, lr=0.05, momentum=0.5),
    test_data=load_test,
)
