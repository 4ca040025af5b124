"""Statistics that a worker makes for a secure sum: with the ranges and bins of the request, without the task's own."""

from typing import Any

import pytest
import torch
from torch import nn
from torch.utils.data import TensorDataset

from atoll.task.deadline import Deadline
from atoll.task.errors import TaskBroken
from atoll.task.task import Task
from atoll.training.statistics.parts import Histogram, Moments
from atoll.training.statistics.question import Question
from atoll.training.worker.site_task import SiteTask

ROWS = [[1.0], [5.0], [12.0], [float("nan")]]
QUESTION = Question(("train",), features=(("inputs[0]", (0.0, 4.0, 10.0)),))


def data(site: str, split: str) -> TensorDataset | None:
    return TensorDataset(torch.tensor(ROWS), torch.tensor([0, 1, 1, 0])) if split == "train" else None


def own(data: Any, split: str) -> dict[str, Any]:
    raise AssertionError("the task's statistics have no place in a layout")


def worker() -> SiteTask:
    task = Task(model=lambda: nn.Linear(1, 2), data=data, loss=nn.functional.cross_entropy, statistics=own)
    return SiteTask(task, {"site": "north"})


def test_the_ranges_and_bins_of_a_request_are_applied() -> None:
    found = worker().statistics({"question": QUESTION.text}, Deadline.never())
    moments = found.parts["train", "features", "inputs[0]"]
    assert isinstance(moments, Moments)
    assert (moments.count, moments.missing, moments.infinite, moments.total) == (2, 1, 1, 6)
    assert found.parts["train", "feature_bins", "inputs[0]"] == Histogram({"0": 1, "1": 1})


def test_a_layout_that_is_none_is_refused() -> None:
    with pytest.raises(TaskBroken, match="question: "):
        worker().statistics({"question": "{}"}, Deadline.never())
