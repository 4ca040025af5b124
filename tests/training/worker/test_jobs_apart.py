"""Each job of a warm worker computes what the first job of a new one does, whatever the jobs before have left."""

import itertools
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn
from torch.utils.data import TensorDataset

from atoll.task.deadline import Deadline
from atoll.task.local import Local
from atoll.task.task import Task
from atoll.task.told import logger
from atoll.training.worker import left_behind
from atoll.training.worker.bench import PROCESS, Received
from atoll.training.worker.model_bench import ModelBench

X = torch.arange(8.0).reshape(8, 1) / 8
CALLS = {"of the loss": 0}
NUMBER = 0


class Net(nn.Module):
    """A line whose scale is an attribute."""

    of_class = 1.0

    def __init__(self) -> None:
        super().__init__()
        self.lin = nn.Linear(1, 1)
        self.scale, self.seen, self.last = 1.0, list[int](), None

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        out: torch.Tensor = self.scale * Net.of_class * self.lin(x)
        return out


class Carrying(Net):
    """Adds its last output."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        out = super().forward(x) if self.last is None else super().forward(x) + self.last
        self.last = out.mean().detach()
        return out


class Counting(Net):
    """Grows with the number of its calls, in a list."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.seen.append(len(x))
        Net.of_class += 0.5
        return super().forward(x) * len(self.seen)


class Drawing(Net):
    """Has a generator, and a buffer outside of its state."""

    def __init__(self) -> None:
        super().__init__()
        self.generator = torch.Generator().manual_seed(3)
        self.register_buffer("count", torch.zeros(()), persistent=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.count += 1
        return super().forward(x) + self.count * torch.randn(x.shape, generator=self.generator)


class Thawing(Net):
    """Trains its bias in its first pass alone."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        out = super().forward(x)
        self.lin.bias.requires_grad_(requires_grad=False)
        return out


class Averaging(nn.Module):
    """A loss that follows the mean of its targets."""

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("mean", torch.zeros(()))
        self.calls = 0

    def forward(self, outputs: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
        self.calls += 1
        self.mean.mul_(0.5).add_(targets.mean())
        return nn.functional.mse_loss(outputs, targets - self.mean) * self.calls


def counted(outputs: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
    """A loss that counts its calls in its module."""
    global NUMBER
    NUMBER += 1
    CALLS["of the loss"] += 1
    return nn.functional.mse_loss(outputs, targets) * (NUMBER + CALLS["of the loss"])


def enclosed() -> Callable[..., torch.Tensor]:
    """Return a loss that counts its calls in its closure."""
    number = 0

    def loss(outputs: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
        nonlocal number
        number += 1
        return nn.functional.mse_loss(outputs, targets) * number

    return loss


class Slower:
    """An optimizer that is slower each time it is made."""

    def __init__(self) -> None:
        self.made = 0

    def __call__(self, parameters: Any, lr: float, **_: Any) -> torch.optim.Optimizer:
        self.made += 1
        return torch.optim.SGD(parameters, lr=lr / self.made)


def fits(leave: Callable[[Any], Any]) -> Callable[..., float]:
    """Return a loop that takes one step, and leaves something on the model."""

    def fit(model: Any, data: Any, local: Local, deadline: Deadline) -> float:
        if model._forward_hooks:
            raise ValueError("Trying to add hooks twice to the same model")
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        nn.functional.mse_loss(model(X), 3 * X).backward()
        optimizer.step()
        leave(model)
        return 1.0

    return fit


BASE = Task(
    model=Net,
    data=lambda site, split: TensorDataset(X, 3 * X),
    loss=nn.functional.mse_loss,
    local=Local(lr=0.1, batch_size=4, shuffle=False),
)
TASKS: dict[str, Task] = {
    "attribute": replace(BASE, model=Carrying),
    "list and class": replace(BASE, model=Counting),
    "generator and buffer": replace(BASE, model=Drawing),
    "flag": replace(BASE, model=Thawing),
    "loss": replace(BASE, loss=Averaging()),
    "globals": replace(BASE, loss=counted),
    "closure": replace(BASE, loss=enclosed()),
    "optimizer": replace(BASE, local=replace(BASE.local, optimizer=Slower())),
    "fit: hook": replace(BASE, fit=fits(lambda model: model.register_forward_hook(lambda *_: torch.zeros(8, 1)))),
    "fit: attribute": replace(BASE, fit=fits(lambda model: setattr(model, "scale", 3.0))),
    "fit: double": replace(BASE, fit=fits(lambda model: model.double())),
    "fit: dtype": replace(BASE, fit=fits(lambda model: setattr(model.lin.bias, "note", torch.set_grad_enabled(False)))),
}


@pytest.fixture(autouse=True)
def _as_before() -> Any:
    """Begin and leave with what the tasks of this page change."""
    global NUMBER
    NUMBER, CALLS["of the loss"], Net.of_class = 0, 0, 1.0
    left_behind._said.clear()
    yield
    torch.set_grad_enabled(True)


def _train(bench: ModelBench, version: dict[str, Any]) -> list[float]:
    outcome = bench.train(Received(version), {"seed": 1, "round_id": 1}, Deadline.never())
    return [float(value) for name in sorted(outcome.trained.update) for value in np.ravel(outcome.trained.update[name])]


def _evaluate(bench: ModelBench, version: dict[str, Any]) -> list[float]:
    found = bench.evaluate(Received(version), {"split": "test"})
    assert not isinstance(found, str)
    return list(found["loss"])


@pytest.mark.parametrize("name", TASKS)
@pytest.mark.parametrize("jobs", list(itertools.product((_train, _evaluate), repeat=2)), ids=lambda jobs: "")
def test_a_job_begins_as_the_first_of_a_new_worker(name: str, jobs: Any) -> None:
    request = {"site": "a", "warm": PROCESS}
    version = ModelBench(BASE, request).initial(0)
    first, second = jobs
    warm = ModelBench(TASKS[name], request)
    alone = second(warm, version)
    first(warm, version)
    assert second(warm, version) == alone
    assert second(warm, version) == alone


def test_a_difference_is_named_once(caplog: pytest.LogCaptureFixture) -> None:
    bench = ModelBench(TASKS["attribute"], {"site": "a", "warm": PROCESS})
    version = bench.initial(0)
    with caplog.at_level("INFO", logger=logger.name):
        for _ in range(3):
            _train(bench, version)
    said = [record.getMessage() for record in caplog.records if record.name == logger.name]
    assert [line for line in said if not line.startswith("read")] == [
        "last: a job has changed it on the model; each begins with it as task.model() made it"
    ]


def test_what_a_loop_keeps_is_named_and_stays(caplog: pytest.LogCaptureFixture) -> None:
    kept: list[int] = []
    task = replace(BASE, fit=fits(lambda model: kept.append(1)))
    bench = ModelBench(task, {"site": "a", "warm": PROCESS})
    version = bench.initial(0)
    with caplog.at_level("INFO", logger=logger.name):
        _train(bench, version)
        _train(bench, version)
    assert kept == [1, 1]
    assert any(record.getMessage().startswith("nonlocal kept: a job has changed it") for record in caplog.records)


def test_data_are_read_anew_for_another_reading_alone() -> None:
    rows = {"train": 4, "test": 2}
    task = replace(BASE, data=lambda site, split: TensorDataset(X[: rows[split]], 3 * X[: rows[split]]))
    bench = ModelBench(task, {"site": "a", "warm": PROCESS})
    version = Received(bench.initial(0))

    def seen(reading: str) -> tuple[int | float, float]:
        request = {"seed": 1, "round_id": 1, "data": reading, "split": "test", "local": {}}
        found = bench.evaluate(version, request)
        assert not isinstance(found, str)
        return bench.train(version, request, Deadline.never()).trained.num_examples, found["loss"][1]

    assert bench.num_examples() == 4
    assert seen("run-1 0") == (4, 2)
    rows |= {"train": 8, "test": 3}
    assert seen("run-1 0") == (4, 2)
    assert seen("run-2 0") == (8, 3)
    rows |= {"train": 5, "test": 1}
    assert seen("run-1 0") == (4, 2)  # two runs that take turns
    assert seen("run-2 0") == (8, 3)
    assert seen("run-3 0") == (5, 1)
