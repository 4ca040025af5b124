"""A task with four sites that train a line each, small enough for hundreds of trainings a second."""

import os
import time
from dataclasses import replace
from pathlib import Path

import torch

from atoll import Local, Metric, Task

SITES = ("a", "b", "c", "d")
SIZES = {"a": 7, "b": 12, "c": 20, "d": 5}


def data(site: str, split: str) -> torch.utils.data.TensorDataset:
    number = SITES.index(site)
    generator = torch.Generator().manual_seed(100 + number)
    size = SIZES[site] if split == "train" else 4
    inputs = torch.randn(size, 3, generator=generator) + number
    targets = (inputs.sum(1) > 3 * number).long()
    return torch.utils.data.TensorDataset(inputs, targets)


def pooled(split: str = "train") -> torch.utils.data.TensorDataset:
    parts = [data(site, split).tensors for site in SITES]
    return torch.utils.data.TensorDataset(*(torch.cat(column) for column in zip(*parts, strict=True)))


def awaited() -> torch.utils.data.TensorDataset:
    """The server's test data, once the file exists that the environment names."""
    while not Path(os.environ["LINE_TASK_GO"]).exists():
        time.sleep(0.02)
    return pooled("test")


def correct(outputs, targets):
    return (outputs.argmax(1) == targets).sum(), len(targets)


def model() -> torch.nn.Module:
    return torch.nn.Sequential(torch.nn.Linear(3, 8), torch.nn.ReLU(), torch.nn.Linear(8, 2))


task = Task(
    model=model,
    data=data,
    sites=SITES,
    loss=torch.nn.functional.cross_entropy,
    metrics={"accuracy": correct},
    local=Local(epochs=1, batch_size=4, lr=0.1),
    test_data=lambda: pooled("test"),
)
no_test_data = replace(task, data=lambda site, split: data(site, split) if split == "train" else None)
awaits_test_data = replace(task, test_data=awaited)
undefined = replace(task, metrics={"auroc": Metric(lambda outputs, targets: [1.0], lambda sums: sums[0] / 0)})
