r"""MNIST with the two models of McMahan et al. 2017, the usual baseline of federated learning.

The data is published in one piece, so it belongs to one site here, and a population splits it among many clients:

    export ATOLL_DATA=...         # the folder with mnist/, which has the four IDX files (docs/data.md)
    atoll population examples/mnist.py:task --set population.kind=shards --set population.clients=100
    atoll simulate examples/mnist.py:task --set population.kind=shards --set population.clients=100 \
        --set round.cohort_size=10 --rounds 100
    atoll train examples/mnist.py:task --epochs 5

Source:
    McMahan et al., "Communication-Efficient Learning of Deep Networks from Decentralized Data", AISTATS 2017, section
    3: `task` is the 2NN of 199,210 parameters, `cnn` the CNN of 1,663,370.
"""

from functools import cache

import torch
from torch import nn
from torch.utils.data import TensorDataset

from atoll import Local, Task
from examples.datasets.folder import data_folder
from examples.datasets.idx import read_mnist
from examples.datasets.owned import Splits


@cache
def mnist() -> Splits:
    """Return 60,000 training and 10,000 test images (n, 1, 28, 28) in [0, 1], with their digits (n,)."""
    return read_mnist(data_folder("mnist"))


def load_all(site: str, split: str) -> TensorDataset | None:
    """Return the training images; the test images are the server's, as in the paper."""
    return mnist().train if split == "train" else None


def load_test() -> TensorDataset:
    """Return the server's test set."""
    return mnist().test


def make_2nn() -> nn.Module:
    """Return a multilayer perceptron with two hidden layers of 200 units and ReLU."""
    return nn.Sequential(
        nn.Flatten(),
        nn.Linear(784, 200),
        nn.ReLU(),
        nn.Linear(200, 200),
        nn.ReLU(),
        nn.Linear(200, 10),
    )


def make_cnn() -> nn.Module:
    """Return two convolutions of 5 x 5 with 32 and 64 channels, each with 2 x 2 pooling, and 512 units with ReLU."""
    return nn.Sequential(
        nn.Conv2d(1, 32, kernel_size=5, padding="same"),
        nn.ReLU(),
        nn.MaxPool2d(2),
        nn.Conv2d(32, 64, kernel_size=5, padding="same"),
        nn.ReLU(),
        nn.MaxPool2d(2),
        nn.Flatten(),
        nn.Linear(64 * 7 * 7, 512),
        nn.ReLU(),
        nn.Linear(512, 10),
    )


def accuracy(outputs: torch.Tensor, targets: torch.Tensor) -> tuple[torch.Tensor, int]:
    """Return the numbers of correct outputs and of all."""
    return (outputs.argmax(dim=1) == targets).sum(), len(targets)


task = Task(
    model=make_2nn,
    data=load_all,
    sites=["all"],
    loss=nn.functional.cross_entropy,
    metrics={"accuracy": accuracy},
    local=Local(epochs=1, batch_size=10, lr=0.1),
    test_data=load_test,
)

cnn = Task(
    model=make_cnn,
    data=load_all,
    sites=["all"],
    loss=nn.functional.cross_entropy,
    metrics={"accuracy": accuracy},
    local=Local(epochs=5, batch_size=10, lr=0.1),
    test_data=load_test,
)
