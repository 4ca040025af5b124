"""Handwritten digits at six sites with unequal shares of each digit: the data of the algorithms in this folder.

The data is scikit-learn's digits (1,797 images of 8 x 8 pixels, shipped with the library). Each digit is split among
the sites by a Dirichlet draw with α = 0.3, and each site holds back a quarter of its examples as a test split.
"""

from functools import cache
from typing import Any

import numpy as np
import torch
from sklearn.datasets import load_digits
from torch import nn
from torch.utils.data import TensorDataset

from atoll import Local, Task

SITES = [f"site-{number}" for number in range(6)]


@cache
def owners() -> dict[str, np.ndarray]:
    """Return the indices of the examples of each site."""
    rng, digits = np.random.default_rng(3), load_digits().target
    shares: dict[str, list[np.ndarray]] = {site: [] for site in SITES}
    for digit in range(10):
        examples = rng.permutation(np.flatnonzero(digits == digit))
        cuts = np.cumsum(rng.dirichlet([0.3] * len(SITES)))[:-1] * len(examples)
        for site, part in zip(SITES, np.split(examples, cuts.round().astype(int)), strict=True):
            shares[site].append(part)
    return {site: rng.permutation(np.concatenate(parts)) for site, parts in shares.items()}


def load_site(site: str, split: str) -> TensorDataset:
    """Return a split of a site's data: images (n, 64) in [0, 1], and the digits (n,) that they show."""
    digits, indices = load_digits(), owners()[site]
    chosen = indices[: len(indices) // 4] if split == "test" else indices[len(indices) // 4 :]
    return TensorDataset(torch.from_numpy(digits.data[chosen] / 16).float(), torch.from_numpy(digits.target[chosen]))


def make_model() -> nn.Module:
    """Return a small perceptron."""
    return nn.Sequential(nn.Linear(64, 32), nn.Tanh(), nn.Linear(32, 10))


def accuracy(outputs: torch.Tensor, targets: torch.Tensor) -> tuple[torch.Tensor, int]:
    """Return the numbers of correct outputs and of all."""
    return (outputs.argmax(dim=1) == targets).sum(), len(targets)


def task_of(**fields: Any) -> Task:
    """Return the task of these sites, with further fields of `Task`."""
    return Task(
        **{
            "model": make_model,
            "data": load_site,
            "loss": nn.functional.cross_entropy,
            "sites": SITES,
            "metrics": {"accuracy": accuracy},
            "local": Local(epochs=2, batch_size=32, lr=0.1),
            **fields,
        }
    )
