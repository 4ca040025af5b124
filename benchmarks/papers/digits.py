"""Handwritten digits and a small net: the task of the tables in `docs/`, with hundreds of runs in minutes.

The data is scikit-learn's digits (1,797 images of 8 x 8 pixels, shipped with the library; the extra `examples`). A
fifth of each digit is the server's test set. The rest belongs to one site, and a population deals it to its clients.
"""

from functools import cache

import numpy as np
import torch
from torch import nn
from torch.utils.data import TensorDataset

from atoll.task.local import Local
from atoll.task.task import Task

SEED = 7


@cache
def split() -> tuple[TensorDataset, TensorDataset]:
    """Load the pooled training data and the test data: images (n, 1, 8, 8) in [0, 1], digits (n,)."""
    from sklearn.datasets import load_digits

    images, digits = load_digits(return_X_y=True)
    rng = np.random.default_rng(SEED)
    is_test = np.zeros(len(digits), bool)
    for digit in range(10):
        examples = rng.permutation(np.flatnonzero(digits == digit))
        is_test[examples[: len(examples) // 5]] = True
    inputs = torch.from_numpy(images / 16).float().view(-1, 1, 8, 8)
    targets = torch.from_numpy(digits)
    return tuple(TensorDataset(inputs[which], targets[which]) for which in (~is_test, is_test))  # type: ignore[return-value]


def load_site(_site: str, split_name: str) -> TensorDataset | None:
    """Return the pooled training data; no site has a test split."""
    return split()[0] if split_name == "train" else None


def load_test() -> TensorDataset:
    """Return the server's test set."""
    return split()[1]


def make_model() -> nn.Module:
    """Build a 64-32-10 network with 2,410 parameters."""
    return nn.Sequential(nn.Flatten(), nn.Linear(64, 32), nn.ReLU(), nn.Linear(32, 10))


def accuracy(outputs: torch.Tensor, targets: torch.Tensor) -> tuple[torch.Tensor, int]:
    """Return the number of correct predictions and the number of examples."""
    return (outputs.argmax(dim=1) == targets).sum(), len(targets)


task = Task(
    model=make_model,
    data=load_site,
    sites=["digits"],
    loss=nn.functional.cross_entropy,
    metrics={"accuracy": accuracy},
    local=Local(epochs=5, max_steps=5, batch_size=16, lr=0.1),
    test_data=load_test,
)
"""Task with five local steps of 16 examples, for any number of a client's examples."""
