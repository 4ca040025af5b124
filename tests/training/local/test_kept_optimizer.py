"""The optimizer's state that stays at a client: two rounds are one training."""

from dataclasses import replace
from typing import Any

import numpy as np
import pytest

from atoll import Algorithm, Local, Task
from atoll.task.arrays import Arrays
from atoll.task.deadline import Deadline
from atoll.task.errors import TaskBroken, TaskMismatch
from atoll.training.local.algorithms import check_training
from atoll.training.worker.bench import Outcome, Received
from atoll.training.worker.model_bench import ModelBench
from tests.parallel.mesh_client import tasks

LOCALS: dict[str, dict[str, Any]] = {
    "adamw": {"optimizer": "adamw", "lr": 0.01},
    "adam": {"optimizer": "adam", "lr": 0.01, "weight_decay": 0.1},
    "momentum": {"momentum": 0.9, "lr": 0.1},
}


def trained(task: Task, version: Arrays, own: Arrays | None, number: int = 0, **local: Any) -> Outcome:
    request = {"site": "here", "local": local, "seed": 1, "version": number}
    return ModelBench(task, request).train(Received(version, own), request, Deadline.never())


@pytest.mark.slow
@pytest.mark.parametrize("kind", LOCALS)
def test_two_rounds_are_one_training_of_two_epochs(kind: str) -> None:
    settings = {**LOCALS[kind], "shuffle": False}
    version = ModelBench(tasks.task, {"site": "here"}).initial(3)
    whole = trained(tasks.task, version, None, epochs=2, **settings).trained.update
    first = trained(tasks.task, version, None, epochs=1, keep_optimizer=True, **settings)
    second_version = {name: array + first.trained.update[name] for name, array in version.items()}
    second = trained(tasks.task, second_version, first.own, 1, epochs=1, keep_optimizer=True, **settings)
    forgetful = trained(tasks.task, second_version, None, 1, epochs=1, keep_optimizer=True, **settings)
    both = {name: first.trained.update[name] + second.trained.update[name] for name in version}
    for name, array in whole.items():
        np.testing.assert_allclose(both[name], array, rtol=1e-4, atol=1e-6)
    assert any(not np.array_equal(second.trained.update[name], forgetful.trained.update[name]) for name in version)
    if kind != "momentum":
        assert {float(array) for name, array in second.own.items() if "/step/" in name} == {12.0}


def test_the_state_of_another_model_is_refused_and_of_another_optimizer_left() -> None:
    version = ModelBench(tasks.task, {"site": "here"}).initial(3)
    first = trained(tasks.task, version, None, keep_optimizer=True, **LOCALS["adamw"])
    lacking = dict(list(first.own.items())[1:])
    with pytest.raises(TaskMismatch, match="missing"):
        trained(tasks.task, version, lacking, keep_optimizer=True, **LOCALS["adamw"])
    other = trained(tasks.task, version, first.own, keep_optimizer=True, **LOCALS["momentum"])
    fresh = trained(tasks.task, version, None, keep_optimizer=True, **LOCALS["momentum"])
    assert all(np.array_equal(other.trained.update[name], fresh.trained.update[name]) for name in version)


def test_what_has_no_state_to_keep_is_refused() -> None:
    for wrong in ({}, {"optimizer": lambda parameters, lr: None}):
        with pytest.raises(ValueError, match=r"local.keep_optimizer: needs adam, adamw, or sgd with a momentum"):
            Local(keep_optimizer=True, **wrong)
    kept = Local(keep_optimizer=True, momentum=0.9)
    for algorithm in ("scaffold", "fednova"):
        with pytest.raises(TaskBroken, match=r"local.keep_optimizer must be False"):
            check_training(tasks.task, algorithm, kept)
    with pytest.raises(TaskBroken, match=r"local.keep_optimizer must be False: the task's code"):
        check_training(replace(tasks.task, algorithm=Algorithm()), "fedavg", kept)
