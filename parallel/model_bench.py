"""A `Task` and one site, ready for work; data and model stay warm from one request to the next."""

from typing import Any

import numpy as np
import torch

from atoll.aggregation.layout import CONTROL, Tensor, in_order
from atoll.parallel.algorithms import check_algorithm
from atoll.parallel.array_task import Trained
from atoll.parallel.arrays import Arrays, check_like
from atoll.parallel.bench import Json, Outcome, Received
from atoll.parallel.deadline import Deadline
from atoll.parallel.errors import TaskBroken
from atoll.parallel.metrics import Statistics
from atoll.parallel.parameters import (
    buffers_of,
    build_model,
    initial_parameters,
    load_parameters,
    trained_by_name,
    update_of,
)
from atoll.parallel.scaffold import ControlVariates, split
from atoll.parallel.task import Task
from atoll.parallel.training import evaluate, make_optimizer, train_locally


class ModelBench:
    """The bench of a `Task`."""

    def __init__(self, task: Task, request: dict[str, Any]) -> None:
        if request.get("threads"):
            torch.set_num_threads(request["threads"])
        self.metrics = task.metrics
        self._task = task
        self._site: str | None = request.get("site")
        self._device = _device(request.get("device") or "cpu")
        self._local = task.local.with_overrides(request.get("local") or {})
        self._algorithm: str = request.get("algorithm") or "fedavg"
        check_algorithm(self._algorithm, self._local, has_fit=task.fit is not None)
        self._model: torch.nn.Module | None = None
        if self._site is not None:  # torch imports a third of itself with the first optimizer: not on a round's time
            make_optimizer(self._local, [torch.nn.Parameter(torch.zeros(1))])
        self._datasets: dict[str, Any] = {}

    def initial(self, seed: int) -> Arrays:
        """Of a newly built model; for SCAFFOLD with the server's control variate, zeros."""
        arrays = initial_parameters(self._task, seed)
        if self._algorithm == "scaffold":
            arrays |= {CONTROL + name: np.zeros_like(arrays[name]) for name in trained_by_name(build_model(self._task))}
        return arrays

    def buffers(self) -> list[str]:
        """Of the task's model."""
        return buffers_of(build_model(self._task))

    def num_examples(self) -> int | None:
        """Of the training split; None without a site."""
        return None if self._site is None else len(self._training_data())

    def train(self, arrays: Received, request: Json, deadline: Deadline) -> Outcome:
        """Train with the built-in loop, or with the task's `fit`."""
        local, algorithm = self._local.with_overrides(request.get("local") or {}), request.get("algorithm") or "fedavg"
        check_algorithm(algorithm, local, has_fit=self._task.fit is not None)
        parameters, server_control = split(arrays.version)
        model, dataset = self._with_parameters(parameters), self._training_data()
        control = None
        if algorithm == "scaffold":
            expected = in_order(Tensor(name, "F32", tuple(p.shape)) for name, p in trained_by_name(model).items())
            check_like(server_control, expected)
            control = ControlVariates(server_control, split(arrays.own or {})[1])
        work = train_locally(
            self._task,
            model,
            dataset,
            local,
            seed=request["seed"],
            deadline=deadline,
            device=self._device,
            corrections=control.corrections if control else None,
        )
        update, own, report = update_of(parameters, model), Arrays(), Json(steps=work.steps)
        if control:
            sent, own = control.after(update, num_steps=work.steps, lr=local.lr)
            update |= sent
        if algorithm == "fednova" and (counted := work.normalizer):
            report |= {"normalizer": counted.normalizer, "effective_steps": counted.effective_steps}
        return Outcome(Trained(update, work.num_examples, work.statistics, work.work), report, own)

    def evaluate(self, arrays: Received, request: Json) -> Statistics | None:
        """On the site's own split, or on the server's data."""
        dataset = self._dataset(request["split"])
        if dataset is None:
            return None
        model = self._with_parameters(split(arrays.version)[0])
        return evaluate(self._task, model, dataset, device=self._device)

    def _with_parameters(self, parameters: Arrays) -> torch.nn.Module:
        if self._model is None:
            self._model = build_model(self._task).to(self._device)
        load_parameters(self._model, parameters)
        return self._model

    def _training_data(self) -> Any:
        if self._site is None:
            raise TaskBroken("this worker was started without a site, so it has no data to train on")
        dataset = self._dataset("train")
        if dataset is None:
            raise TaskBroken(f"task.data({self._site!r}, 'train') gave no data set")
        return dataset

    def _dataset(self, split: str) -> Any:
        if split not in self._datasets:
            if split == "server":
                self._datasets[split] = self._task.test_data() if self._task.test_data else None
            else:
                self._datasets[split] = self._task.data(self._site, split) if self._site else None
        return self._datasets[split]


def _device(name: str) -> str:
    """ "auto" is a GPU when torch finds one; only here, in the worker, is torch there to ask."""
    if name == "auto":
        return "cuda" if torch.cuda.is_available() else "cpu"
    if name == "cuda" and not torch.cuda.is_available():
        raise TaskBroken("device 'cuda' is set, and torch finds no GPU; allowed: auto, cpu")
    return name
