"""Tensors that do not travel: which they are, that nothing changes them, and trainings with and without them."""

from typing import Any

import numpy as np
import pytest
import torch
from torch import nn

from atoll import Deadline, Task
from atoll.task.errors import TaskBroken, TaskMismatch
from atoll.training.base.digests import digest_of, line_of
from atoll.training.model.frozen import (
    Unchanged,
    frozen_digest,
    frozen_of,
    frozen_tensors,
    keep_frozen,
    trained_names,
)
from atoll.training.model.parameters import build_model, initial_parameters
from atoll.training.worker.bench import Outcome, Received
from atoll.training.worker.model_bench import ModelBench
from tests.training.tasks import make_task


class Counted(nn.Module):
    """A layer that counts its calls, beside its weight."""

    def __init__(self, is_trained: bool) -> None:
        super().__init__()
        self.scale = nn.Parameter(torch.ones(6), requires_grad=is_trained)
        self.register_buffer("calls", torch.zeros(()))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.calls += 1
        return x * self.scale


def partly_frozen(first: nn.Module | None = None) -> nn.Module:
    """Layers of which the first is frozen, the norm's scale too; the head is trained."""
    model = nn.Sequential(first or nn.Linear(6, 6), nn.BatchNorm1d(6), nn.Tanh(), nn.Linear(6, 3))
    if first is None:
        model[0].requires_grad_(False)
    model[1].requires_grad_(False)
    return model


def task_of(model: Any, travels: str = "trained") -> Task:
    task = make_task(model)
    return Task(**{name: getattr(task, name) for name in ("model", "data", "sites", "loss", "local")}, travels=travels)


def trained_once(task: Task, algorithm: str = "fedavg", **local: Any) -> Outcome:
    request = {"site": "b", "seed": 3, "model_seed": 5, "local": local, "algorithm": algorithm}
    bench = ModelBench(task, request)
    return bench.train(Received(bench.initial(5)), request, Deadline.never())


HEAD = {"3.weight", "3.bias"}
STATISTICS = {"1.running_mean", "1.running_var", "1.num_batches_tracked"}


def test_what_training_changes_travels_and_nothing_else() -> None:
    assert set(initial_parameters(task_of(partly_frozen), 0)) == HEAD | STATISTICS
    assert trained_names(partly_frozen(Counted(True))) == HEAD | STATISTICS | {"0.scale", "0.calls"}
    assert trained_names(partly_frozen(Counted(False))) == HEAD | STATISTICS


def test_a_tied_tensor_is_trained_under_all_of_its_names() -> None:
    model = nn.Sequential(nn.Linear(6, 6, bias=False), nn.Linear(6, 6, bias=False), nn.Linear(6, 3))
    model[1].weight = model[0].weight
    model[2].requires_grad_(False)
    keep_frozen(model)
    assert frozen_of(model) == {"2.weight", "2.bias"}


@pytest.mark.parametrize(
    ("algorithm", "local"),
    [
        ("fedavg", {"prox_mu": 0.5}),
        ("fedavg", {"clip_norm": 0.1}),
        ("fedavg", {"optimizer": "adamw", "lr": 0.01}),
        ("fednova", {"momentum": 0.5}),
        ("scaffold", {}),
    ],
)
def test_a_training_has_the_bits_of_one_in_which_all_travels(algorithm: str, local: dict[str, Any]) -> None:
    """What is frozen has an update of zeros there."""
    outcomes = [trained_once(task_of(partly_frozen, how), algorithm, **local) for how in ("all", "trained")]
    every, fewer = (outcome.trained.update for outcome in outcomes)
    assert set(fewer) == {name for name in every if not name.startswith(("0.", "1.weight", "1.bias"))}
    for name, array in every.items():
        assert np.array_equal(array, fewer.get(name, np.zeros_like(array))), name
    assert outcomes[0].report == outcomes[1].report


def test_a_model_with_nothing_to_train_is_refused() -> None:
    task = task_of(lambda: partly_frozen().requires_grad_(False))
    with pytest.raises(TaskBroken, match="has no parameter to train"):
        ModelBench(task, {}).initial(0)


def test_a_trained_view_of_a_frozen_tensor_is_refused() -> None:
    def sharing() -> nn.Module:
        model = nn.Sequential(nn.Linear(6, 6), nn.Linear(6, 3))
        model[0].requires_grad_(False)
        model[1].weight = nn.Parameter(model[0].weight.detach()[:3])
        return model

    with pytest.raises(TaskBroken, match=r"0\.weight: frozen, and a trained tensor has the same memory"):
        build_model(task_of(sharing), 0)


def test_neighbours_in_one_memory_share_nothing() -> None:
    def flat() -> nn.Module:
        memory = torch.randn(2, 6, 6)
        model = nn.Sequential(nn.Linear(6, 6, bias=False), nn.Linear(6, 6, bias=False))
        model[0].weight = nn.Parameter(memory[0], requires_grad=False)
        model[1].weight = nn.Parameter(memory[1])
        return model

    assert frozen_of(build_model(task_of(flat), 0)) == {"0.weight"}


def test_a_frozen_buffer_that_training_changes_is_refused_by_name() -> None:
    with pytest.raises(TaskBroken, match=r"^0\.calls: training or evaluation changes them"):
        trained_once(task_of(lambda: partly_frozen(Counted(False))))


class CountedInEvaluation(Counted):
    """A layer that counts the calls of evaluations alone."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x * self.scale if self.training else super().forward(x)


def test_a_frozen_buffer_that_an_evaluation_changes_is_refused_there() -> None:
    """And not in the training after it, which has a new model."""
    request = {"site": "b", "seed": 3, "model_seed": 5, "split": "train"}
    bench = ModelBench(task_of(lambda: partly_frozen(CountedInEvaluation(False))), request)
    version = Received(bench.initial(5))
    for _ in range(2):
        assert bench.train(version, request, Deadline.never()).trained.work == 1.0
        with pytest.raises(TaskBroken, match=r"^0\.calls: training or evaluation changes them"):
            bench.evaluate(version, request)


def test_a_frozen_parameter_that_training_replaces_is_refused_by_name() -> None:
    model = build_model(task_of(partly_frozen), 0)
    unchanged = Unchanged(lambda: frozen_tensors(model))
    unchanged.check()
    model[0].weight = nn.Parameter(model[0].weight.detach().clone(), requires_grad=False)  # type: ignore[operator,assignment]
    with pytest.raises(TaskBroken, match=r"^0\.weight: training"):
        unchanged.check()


def test_the_digest_is_of_names_dtypes_shapes_and_bytes() -> None:
    found = frozen_digest(build_model(task_of(partly_frozen), 5))
    assert found == frozen_digest(build_model(task_of(partly_frozen), 5))
    assert found != frozen_digest(build_model(task_of(partly_frozen), 6))
    assert frozen_digest(build_model(task_of(partly_frozen, "all"), 5)) == ""
    ones = torch.ones(2, 3)
    lines = [line_of(tensor) for tensor in (ones, ones.T, ones.reshape(-1), ones.bfloat16(), 2 * ones)]
    assert len(set(lines)) == 5
    assert line_of(torch.arange(6).reshape(2, 3).T) == line_of(torch.tensor([[0, 3], [1, 4], [2, 5]]))
    assert digest_of({"a": lines[0], "b": lines[1]}) != digest_of({"b": lines[0], "a": lines[1]})


def test_a_site_whose_frozen_tensors_differ_is_refused_with_both_digests() -> None:
    ours, theirs = (frozen_digest(build_model(task_of(partly_frozen), seed)) for seed in (5, 6))
    trained_once(task_of(partly_frozen), **{"model.frozen": ours})
    with pytest.raises(TaskMismatch, match=f"{ours} at b, and {theirs} in the run"):
        trained_once(task_of(partly_frozen), **{"model.frozen": theirs})
    with pytest.raises(TaskMismatch, match=f"none at b, and {theirs} in the run"):
        trained_once(task_of(partly_frozen, "all"), **{"model.frozen": theirs})


def test_a_wrong_word_is_refused_when_the_task_is_made() -> None:
    with pytest.raises(ValueError, match='travels must be "all" or "trained", got \'head\''):
        task_of(partly_frozen, "head")
