"""The evaluation of a version on the clients' test data: one client after another, in one model.

A job requests the evaluation of one client: its seed is the run's model seed, its `own` the tensors that stay at the
client. The result is the sums of the loss and the metrics, or the reason why there are none, with the bits of a
deployed client.
"""

import sys
from collections.abc import Sequence
from contextlib import nullcontext
from dataclasses import replace
from functools import partial
from typing import Any, Protocol

import torch

from atoll.ground.printable import conclusion
from atoll.simulations.engines.engine import Job, Training, naming
from atoll.simulations.engines.examples import Examples, ExamplesOf
from atoll.simulations.engines.exchange import Exchange
from atoll.simulations.engines.one_state import OneState
from atoll.task.apps import AppTask
from atoll.task.arrays import Arrays
from atoll.task.context import context_of, depends_on_context, within
from atoll.task.metrics import Statistics
from atoll.task.randomness import generators_kept, repeat_on, seed_everything
from atoll.task.task import Task
from atoll.training.local.training import Evaluation
from atoll.training.model.parameters import build_model
from atoll.training.worker.bench import Bench, Received
from atoll.training.worker.benches import bench_of
from atoll.training.worker.model_bench import ModelBench
from atoll.training.worker.operations import detail_of, kind_of

NO_DATA = "this site has no such data"

WINDOWS, WINDOW_MAX = 8, 512
"""Minimum number of windows, if there are as many clients, and maximum number of clients in a window."""


class Measurer(Protocol):
    """Measurer of clients, in any process."""

    def begin(self, version: Arrays, number: int = 0) -> None:
        """Set the version that is measured next, and its number."""
        ...

    def measure(self, jobs: Sequence[Job]) -> list[Statistics | str]:
        """Return the sums of each job's client, or the reason why there are none, for a window of jobs."""
        ...


def windows_of(jobs: Sequence[Job]) -> list[Sequence[Job]]:
    """Return windows of the jobs, in their order, which do not depend on the number of processes."""
    size = max(1, min(WINDOW_MAX, -(-len(jobs) // WINDOWS)))
    return [jobs[first : first + size] for first in range(0, len(jobs), size)]


def measurer_of(training: Training) -> Measurer:
    """Return the measurer that evaluates one client after another."""
    task = training.task
    return OneModel(training) if isinstance(task, Task) and task.algorithm is None else OfBenches(training)


class OneModel:
    """Measurer of a `Task` without a custom algorithm.

    Args:
        training: the settings of all clients' training.
    """

    def __init__(self, training: Training) -> None:
        assert isinstance(training.task, Task)
        self._training, self.task = training, training.task
        repeat_on(training.device)
        self.examples = ExamplesOf(self.task, training.device, "test")
        self.model = build_model(self.task, training.model_seed).to(training.device).eval()
        self._state = OneState(self.model)
        self._exchange = Exchange(training, self.model)
        self._evaluation = Evaluation(self.task, self.model, device=training.device)
        self._has_context = depends_on_context(self.task)
        self._layers = self._exchange.layers
        self._number = 0

    def begin(self, version: Arrays, number: int = 0) -> None:
        """Set the version that is measured next; raise TaskMismatch if it belongs to another model."""
        self._number = number
        self._exchange.begin(version)
        self._state.begin_round()

    def measure(self, jobs: Sequence[Job]) -> list[Statistics | str]:
        """Evaluate one client after another; see `Measurer`."""
        found: list[Statistics | str] = []
        with generators_kept():
            for job in jobs:
                with naming(job.client_id, "evaluation"):
                    examples = self.examples.find(job.client_id)
                    found.append(NO_DATA if examples is None else self.one(job, examples))
        return found

    def one(self, job: Job, examples: Examples) -> Statistics:
        """Return the sums of one client on its examples; the random generators are not restored."""
        self.load(job)
        seed_everything(job.seed)
        with within(self._context(job)) if self._has_context else nullcontext():
            found = self._evaluation(partial(_batch, examples), examples.count)
        self._state.end()
        self.check_frozen()
        return found

    def load(self, job: Job) -> None:
        """Load the version, with the layers that stay at the client, into the model."""
        self._state.begin()
        own = {name: array for name, array in (job.own or {}).items() if name in self._layers}
        self._exchange.load(job if own.keys() == (job.own or {}).keys() else replace(job, own=own or None))

    def check_frozen(self) -> None:
        """Check that nothing has changed the tensors that are never sent; raise TaskBroken with their names."""
        self._exchange.check_frozen()

    def _context(self, job: Job) -> Any:
        return context_of(self.task, site=job.client_id, version=self._number, seed=job.seed)


def _batch(examples: Examples, epoch: int, rows: torch.Tensor) -> Any:
    """Return a batch of a client's examples; random draws in it are the same in every evaluation."""
    if examples.tensors is None:
        return examples.fetch(0, epoch, rows)
    if examples.chosen is None and len(rows) == examples.count:  # all, in their order: a task may change its copy
        return [tensor.clone() for tensor in examples.tensors]
    places = examples.rows(rows)
    return [tensor[places] for tensor in examples.tensors]


class OfBenches:
    """Measurer that uses the bench of a deployed worker, for a task with a custom algorithm, and an `ArrayTask`.

    Args:
        training: the settings of all clients' training.
    """

    def __init__(self, training: Training) -> None:
        self._training = training
        self._bench: ModelBench | None = None
        self._version: Arrays = {}
        self._number = 0
        self._said: set[str] = set()

    def begin(self, version: Arrays, number: int = 0) -> None:
        """Set the version that is measured next."""
        self._version, self._number = version, number

    def _say(self, line: str) -> None:
        """Print once, on stderr, the error of an app, because it appears in no metric."""
        if line not in self._said:
            self._said.add(line)
            sys.stderr.write(f"{line}\n")

    def measure(self, jobs: Sequence[Job]) -> list[Statistics | str]:
        """Evaluate one client after another; see `Measurer`."""
        found: list[Statistics | str] = []
        for job in jobs:
            with naming(job.client_id, "evaluation"):
                bench = self._bench_at(job)
                try:
                    found.append(bench.evaluate(Received(self._version, job.own), self._request(job)))
                except (Exception, SystemExit) as error:
                    if not isinstance(self._training.task, AppTask):
                        raise
                    found.append(f"{kind_of(error, 'evaluate')}: {detail_of(error)}")  # the process continues
                    self._say(f"note: the evaluation of {job.client_id} failed: {conclusion(detail_of(error))}")
        return found

    def _bench_at(self, job: Job) -> Bench:
        """Return the bench of a client; clients of a `Task` share the one with the only model."""
        task = self._training.task
        if not isinstance(task, Task):
            return bench_of(task, self._request(job))
        self._bench = self._bench or ModelBench(task, self._request(job))
        self._bench.visit(job.client_id)
        return self._bench

    def _request(self, job: Job) -> dict[str, Any]:
        training = self._training
        return {
            "site": job.client_id,
            "split": "test",
            "local": dict(training.overrides),
            "algorithm": training.algorithm,
            "device": training.device,
            "model_seed": training.model_seed,
            "run_number": training.run_number,
            "asked_at": job.asked_at,
            "version": self._number,
        }
