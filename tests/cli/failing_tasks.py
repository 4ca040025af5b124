"""Tasks that fail while a client trains, each in its own way."""

import multiprocessing
import os
import signal
import sys
from dataclasses import replace
from pathlib import Path

import torch
from torch.utils.data import Dataset, TensorDataset

from examples.datasets.idx import read_idx
from tests.simulations.federation import line_task

task = line_task.task


def _bad_label(site: str, split: str) -> TensorDataset:
    found = line_task.data(site, split)
    if (site, split) == ("d", "train"):
        found.tensors[1][3] = 77
    return found


def _own_mistake(outputs: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
    raise RuntimeError("no loss\ntoday")


def _ends_the_process(outputs: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
    sys.exit(0)


def _moves_away(outputs: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
    os.chdir("/")
    return torch.nn.functional.cross_entropy(outputs, targets)


def _loss_of_each(outputs: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
    return torch.nn.functional.cross_entropy(outputs, targets, reduction="none")


def _killed(outputs: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
    if multiprocessing.parent_process() is not None:
        os.kill(os.getpid(), signal.SIGKILL)
    return torch.nn.functional.cross_entropy(outputs, targets)


def _damaged(site: str, split: str) -> TensorDataset:
    return TensorDataset(torch.from_numpy(read_idx(Path("damaged"))))


def _not_finite(site: str, split: str) -> TensorDataset:
    found = line_task.data(site, split)
    if (site, split) == ("b", "train"):
        found.tensors[0].fill_(float("nan"))
    return found


def _no_data(site: str, split: str) -> TensorDataset:
    raise RuntimeError("no data")


class _Record(Dataset[tuple[torch.Tensor, int]]):
    def __len__(self) -> int:
        return 5

    def __getitem__(self, index: int) -> tuple[torch.Tensor, int]:
        raise KeyError("a record")


def _no_record(site: str, split: str) -> Dataset[tuple[torch.Tensor, ...]]:
    return _Record() if (site, split) == ("c", "train") else line_task.data(site, split)


def _no_model() -> torch.nn.Module:
    raise RuntimeError("no model")


bad_label = replace(task, data=_bad_label)
own_mistake = replace(task, loss=_own_mistake)
ends_the_process = replace(task, loss=_ends_the_process)
moves_away = replace(task, loss=_moves_away)
no_test_data = replace(task, test_data=lambda: sys.exit(0))
loss_of_each = replace(task, loss=_loss_of_each)
loss_and_weight = replace(task, loss=lambda outputs, targets: (_loss_of_each(outputs, targets).sum(), len(targets)))
loss_number = replace(task, loss=lambda outputs, targets: _loss_of_each(outputs, targets).mean().item())
loss_detached = replace(task, loss=lambda outputs, targets: _loss_of_each(outputs, targets).mean().detach())
loss_counted = replace(task, loss=lambda outputs, targets: (outputs.argmax(1) != targets).sum())
no_loss = replace(task, loss=lambda outputs, targets: None)
LOSSES = {
    "loss_of_each": "a single number, the mean over the batch, as a tensor, got shape (",
    "loss_and_weight": "got tuple (where it is a sum and a weight, return their quotient",
    "loss_number": "got float",
    "loss_detached": "has no gradient: it was detached",
    "loss_counted": "must be a float, got torch.int64",
    "no_loss": "got NoneType",
}
"""Parts of the sentences about losses that are no single number, by the name of the task."""


def _grows(outputs: torch.Tensor, targets: torch.Tensor) -> list[float]:
    _GROWN.append(1.0)
    return list(_GROWN)


_GROWN: list[float] = []
metric_number = replace(task, metrics={"half": lambda outputs, targets: 0.5})
metric_grows = replace(task, metrics={"grows": _grows})


class _InfiniteMask(torch.nn.Sequential):
    def __init__(self) -> None:
        super().__init__(*line_task.task.model().children())
        self.register_buffer("mask", torch.tensor([0.0, -torch.inf]))


infinite_mask = replace(task, model=_InfiniteMask)
killed = replace(task, loss=_killed)
damaged = replace(task, data=_damaged)


def _no_labels(site: str, split: str) -> TensorDataset:
    return TensorDataset(torch.rand(6, 1, 8, 8), torch.rand(6, 1))


no_labels = replace(task, data=_no_labels, test_data=None)
not_finite = replace(task, data=_not_finite)


def _undefined_at_c(outputs: torch.Tensor, targets: torch.Tensor) -> tuple[float, int]:
    return (float("nan") if bool((targets == 2).any()) else 0.5), len(targets)


def _third_class_at_c(site: str, split: str) -> TensorDataset:
    inputs, targets = line_task.data(site, split).tensors
    return TensorDataset(inputs, torch.full_like(targets, 2) if site == "c" else targets)


undefined_at_c = replace(
    task, data=_third_class_at_c, model=lambda: torch.nn.Linear(3, 3), metrics={"f1": _undefined_at_c}
)
"""A task whose metric is NaN at site c."""
no_data = replace(task, data=_no_data)
no_model = replace(task, model=_no_model)
no_record = replace(task, data=_no_record)


def _single_at_d(site: str, split: str) -> TensorDataset:
    found = line_task.data(site, split)
    return TensorDataset(*(tensor[:1] for tensor in found.tensors)) if (site, split) == ("d", "train") else found


def _ignored_at_d(site: str, split: str) -> TensorDataset:
    inputs, targets = line_task.data(site, split).tensors
    return TensorDataset(inputs, torch.full_like(targets, -100) if site == "d" else targets)


def _mean_of_counted(outputs: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
    counted = (targets != -100).sum().clamp(min=1)
    return torch.nn.functional.cross_entropy(outputs, targets, reduction="sum") / counted


lone_row = replace(
    task, data=_single_at_d, model=lambda: torch.nn.Sequential(torch.nn.BatchNorm1d(3), torch.nn.Linear(3, 2))
)
ignored = replace(
    task, data=_ignored_at_d, loss=_mean_of_counted, units=lambda targets: (targets != -100).sum(), metrics={}
)
NOTHING_TO_TRAIN = {
    "lone_row": "a batch norm has a single value per channel to normalize, as in a batch of one row: train on at least",
    "ignored": "the targets of 5 trained examples have no units (task.units gives 0), so there is nothing to train on",
}
"""Beginnings of the sentences about a site d whose rows give no training, by the name of the task."""
