"""The pooled data of a task: the data of all its sites, in one place."""

from collections.abc import Mapping
from typing import Any

import torch
from torch.utils.data import ConcatDataset, TensorDataset

from atoll.parallel.data.loader import Loader
from atoll.parallel.data.order import Order
from atoll.parallel.local_training.draws import Steady
from atoll.parallel.task.errors import TaskBroken
from atoll.parallel.task.randomness import data_of, server_data_of
from atoll.parallel.task.task import Task


def pooled(task: Task, split: str) -> Any | None:
    """Return the data of all sites, one after another; None if no site has such a split.

    Args:
        task: with its sites.
        split: "train" or "test".
    """
    found = [data for site in task.sites if (data := data_of(task, site, split)) is not None and len(data)]
    if not found:
        return None
    if all(type(data) is TensorDataset for data in found):  # one index operation reads a batch
        return TensorDataset(*(torch.cat(columns) for columns in zip(*(data.tensors for data in found), strict=True)))
    return ConcatDataset(found)


def training_data(task: Task) -> Any:
    """Return the pooled training data.

    Raises:
        TaskBroken: there is none.
    """
    data = pooled(task, "train")
    if data is None:
        raise TaskBroken(f"none of the sites {', '.join(task.sites)} has data to train on")
    return data


def test_data(task: Task) -> Mapping[str, Any]:
    """Return the data for evaluations that exist: `sites`, the sites' test data pooled, and `test`, the task's own.

    Raises:
        TaskBroken: the task's own has no examples, as a simulated or deployed run refuses it.
    """
    found = {"sites": pooled(task, "test"), "test": server_data_of(task)}
    if found["test"] is not None and not len(found["test"]):
        raise TaskBroken("the task's test_data has no examples: give it some, or leave test_data out")
    return {name: data for name, data in found.items() if data is not None}


def in_order(data: Any, *, batch_size: int, num_ranks: int, rank: int, device: torch.device) -> Loader:
    """Return a loader of every example once, with the same number of batches on each rank, and the same random numbers
    in every epoch if the data set draws some.
    """
    order = Order(num_examples=len(data), batch_size=max(batch_size, num_ranks), num_ranks=num_ranks, shuffle=False)
    return Loader(Steady(data), order, rank=rank, device=device)
