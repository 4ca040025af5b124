"""MNIST with the two models of McMahan et al. 2017: the experiments that everybody compares with.

The data is published in one piece, so that all of it belongs to one owner, and a population deals it to many:

    export ATOLL_DATA=...         # the folder in which mnist/ lies, with the four IDX files (docs/data.md)
    atoll population examples/mnist.py:task --set population.kind=shards --set population.clients=100
    atoll simulate examples/mnist.py:task --set population.kind=shards --set population.clients=100 \\
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
from atoll.parallel.data.public.folder import data_folder
from atoll.parallel.data.public.idx import read_mnist
from atoll.parallel.data.public.owned import Splits


@cache
def mnist() -> Splits:
    """60,000 and 10,000 images (n, 1, 28, 28) in [0, 1], digits (n,)."""
    return read_mnist(data_folder("mnist"))


def load_all(site: str, split: str) -> TensorDataset | None:
    """The training images. The test images are the server's, as in the paper."""
    return mnist().train if split == "train" else None


def load_test() -> TensorDataset:
    """The server's test set."""
    return mnist().test


def make_2nn() -> nn.Module:
    """A multilayer perceptron with two hidden layers of 200 units and ReLU."""
    return nn.Sequential(
        nn.Flatten(),
        nn.Linear(784, 200),
        nn.ReLU(),
        nn.Linear(200, 200),
        nn.ReLU(),
        nn.Linear(200, 10),
    )


def make_cnn() -> nn.Module:
    """Two convolutions of 5 x 5 with 32 and 64 channels, each followed by pooling of 2 x 2; 512 units and ReLU."""
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
    """How many are right, of how many."""
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
