from dataclasses import replace
from typing import Any

import pytest
import torch
from torch.utils.data import ConcatDataset, Subset

from atoll.parallel.trainer.data import data_of_sites, pooled
from atoll.task.errors import TaskBroken
from atoll.task.task import Task
from atoll.training.data.batches import fetcher
from atoll.training.local.training import evaluate, train_locally

ROWS = [{"x": [float(number)] * (1 + number % 3), "y": number % 2} for number in range(12)]


def padded(rows: list[dict[str, Any]]) -> tuple[torch.Tensor, torch.Tensor]:
    longest = max(len(row["x"]) for row in rows)
    x = torch.tensor([row["x"] + [0.0] * (longest - len(row["x"])) for row in rows])
    return x, torch.tensor([row["y"] for row in rows])


class Sum(torch.nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.weight = torch.nn.Parameter(torch.zeros(2))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x.sum(1, keepdim=True) * self.weight


def a_task() -> Task:
    loss = torch.nn.functional.cross_entropy
    return Task(model=Sum, data=lambda site, split: ROWS, loss=loss, sites=["a", "b"], collate=padded)


@pytest.mark.parametrize(
    "wrap", [lambda data: data, lambda data: Subset(data, range(12)), lambda data: ConcatDataset([data])]
)
def test_dict_rows_of_different_lengths_are_padded_by_the_tasks_collate_in_any_wrapping(wrap: Any) -> None:
    x, y = fetcher(wrap(a_task().data("a", "train")))(torch.tensor([0, 2]))
    assert (x.tolist(), y.tolist()) == ([[0, 0, 0], [2, 2, 2]], [0, 0])


def test_a_copy_of_a_task_collates_once_and_pooled_data_keep_it() -> None:
    task = replace(a_task(), metrics={})
    x, _ = fetcher(pooled(data_of_sites(task, "train")))(torch.tensor([1, 12]))
    assert x.tolist() == [[1, 1], [0, 0]]


def test_local_training_with_collate_is_a_plain_loop_over_padded_batches() -> None:
    task, model = a_task(), Sum()
    local = replace(task.local, batch_size=4, shuffle=False, lr=0.01)
    assert train_locally(task, model, task.data("a", "train"), local, seed=0).num_examples == 12
    weight = torch.zeros(2, requires_grad=True)
    for start in (0, 4, 8):
        x, y = padded(ROWS[start : start + 4])
        (slope,) = torch.autograd.grad(task.loss(x.sum(1, keepdim=True) * weight, y), weight)
        weight = (weight - 0.01 * slope).detach().requires_grad_()
    torch.testing.assert_close(model.weight, weight)
    assert evaluate(task, model, task.data("a", "test"))["loss"][1] == 12


def test_collate_must_be_callable() -> None:
    with pytest.raises(ValueError, match="collate must be callable or None, got 3"):
        Task(model=Sum, data=lambda site, split: ROWS, loss=max, collate=3)  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("rows", "fault"),
    [
        ([{"x": 1.0, "y": 2}], "a row must be a pair .inputs, targets., got dict with the keys x, y .Task.collate="),
        ([(1.0, 2, 3)], "got list of 3"),
        ([(torch.ones(2), 0), (torch.ones(3), 0)], "pairs .inputs, targets. of equal shapes: .*Task.collate="),
        (torch.utils.data.TensorDataset(torch.ones(2)), "got tuple of 1"),
    ],
)
def test_a_row_that_is_no_pair_is_refused_with_what_it_must_be(rows: Any, fault: str) -> None:
    with pytest.raises(TaskBroken, match=fault):
        fetcher(rows)(torch.arange(len(rows)))
