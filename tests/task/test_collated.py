"""What is no data set of rows is refused by name before a row of it is read, in every way to run a task."""

import re
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn
from torch.utils.data import ConcatDataset, DataLoader, Dataset, IterableDataset, Subset, TensorDataset

from atoll.parallel.trainer.data import data_of_sites
from atoll.simulations.populations.config import PopulationConfig
from atoll.simulations.populations.population import populate
from atoll.task.collated import form_fault
from atoll.task.errors import TaskBroken
from atoll.task.randomness import data_of, server_data_of
from atoll.task.task import Task

X, Y = torch.ones(4, 2), torch.zeros(4, dtype=torch.int64)
ROWS = TensorDataset(X, Y)


class WithoutLength(Dataset[Any]):
    def __getitem__(self, index: int) -> Any:
        return ROWS[index]


class Stream(IterableDataset[Any]):
    def __len__(self) -> int:
        return 4


class Endless:
    """Random crops, as many as anyone likes."""

    def __init__(self, size: int) -> None:
        self.size = size

    def __len__(self) -> int:
        return self.size

    def __getitem__(self, index: int) -> Any:
        return X[0], 0


class Frame:
    """The form of a table of pandas."""

    iloc: Any = None

    def __len__(self) -> int:
        return 4

    def __getitem__(self, column: str) -> Any:
        return {"x": X}[column]


NO_ROWS = {
    "a loader": (DataLoader(ROWS, batch_size=2), "a DataLoader, which makes batches by itself; allowed: .*its rows"),
    "a generator": ((row for row in ROWS), "generator, which has no length or no items; allowed: a map-style dataset"),
    "no length": (WithoutLength(), "WithoutLength, which has no length"),
    "arrays": ((X.numpy(), Y.numpy()), r"a tuple of arrays, whose items are the arrays; TensorDataset\("),
    "a list of arrays": ([X, Y], "a list of arrays, whose items are the arrays"),
    "columns": ({"x": X, "y": Y}, "a dict with the keys x, y, and rows have numbers"),
    "splits": ({"train": ROWS, "test": ROWS}, "a dict with the keys train, test, and rows have numbers"),
    "many rows": (Endless(10**10), "Endless of 10,000,000,000 rows, whose order no epoch can draw; allowed: at most"),
    "endless": (Endless(10**20), "Endless of 100,000,000,000,000,000,000 rows"),
    "a table": (Frame(), "a Frame, whose items are its columns"),
}


def task_of(given: Any, **changes: Any) -> Task:
    fields: dict[str, Any] = {"model": lambda: nn.Linear(2, 2), "loss": nn.functional.cross_entropy, "sites": ["a"]}
    return Task(data=lambda site, split: given if split == "train" else None, **(fields | changes))


@pytest.mark.parametrize("name", NO_ROWS)
@pytest.mark.parametrize("collate", [None, lambda rows: (rows, rows)], ids=["", "collated"])
def test_what_has_no_rows_is_refused_by_its_kind(name: str, collate: Any) -> None:
    given, fault = NO_ROWS[name]
    if collate is not None and "array" in name:
        return  # rows of a form that the collation knows
    task = task_of(given, collate=collate, test_data=lambda: given)
    reads: list[Callable[[], object]] = [
        lambda: data_of(task, "a", "train"),
        lambda: data_of_sites(task, "train"),
        lambda: populate(PopulationConfig(), task, seed=0),
    ]
    for read in reads:
        with pytest.raises(TaskBroken, match=rf"task\.data\('a', 'train'\) gave {fault}"):
            read()
    with pytest.raises(TaskBroken, match=rf"task\.test_data\(\) gave {fault}"):
        server_data_of(task)


@pytest.mark.parametrize(
    "rows",
    [
        ROWS,
        Subset(ROWS, [1, 2]),
        ConcatDataset([ROWS, ROWS]),
        list(ROWS),
        tuple(ROWS),
        {0: ROWS[0], 1: ROWS[1]},
        np.zeros(3, [("x", "f4"), ("y", "i8")]),
        [],
        {},
        Endless(10**9),
    ],
    ids=lambda rows: re.sub(r"\W.*", "", type(rows).__name__),
)
def test_what_may_have_rows_is_not_refused(rows: Any) -> None:
    assert form_fault(rows) == ""


def test_a_fit_of_the_task_reads_data_of_its_own_form() -> None:
    loader = DataLoader(ROWS)
    assert data_of(task_of(loader, fit=lambda model, data, local, deadline: 1.0), "a", "train") is loader
