"""The built-in training loop: one client after another in one model, with the bits of `ModelBench.train`."""

from collections.abc import Iterator, Sequence
from contextlib import nullcontext
from itertools import islice
from typing import Any

import numpy as np
import torch

from atoll.simulations.engines.engine import Failed, Job, Trained, Training, naming
from atoll.simulations.engines.examples import Examples, ExamplesOf
from atoll.simulations.engines.exchange import Exchange
from atoll.simulations.engines.one_state import OneState
from atoll.simulations.engines.pooling import speed_up_pooling
from atoll.simulations.engines.rows import Rows
from atoll.task.arrays import Arrays
from atoll.task.context import Context, context_of, depends_on_context, within
from atoll.task.errors import NotFinite
from atoll.task.randomness import repeat_on, seed_everything
from atoll.task.task import Task
from atoll.training.data.batches import batch_sizes
from atoll.training.data.units import units_of
from atoll.training.local.fednova import Normalizer
from atoll.training.local.step import Descent, Step
from atoll.training.model.parameters import build_model
from atoll.training.trials.contract import lone_row_refused

BLOCK_BYTES = 8 << 20
"""Maximum size of the results of a window, which are contiguous in memory."""


class Loop:
    """Built-in loop of a `Task`, whose model is built once.

    Args:
        training: the settings of all clients' training.
    """

    def __init__(self, training: Training) -> None:
        assert isinstance(training.task, Task)
        self._task = training.task
        repeat_on(training.device)
        self.examples = ExamplesOf(training.task, training.device)
        self.model = build_model(training.task, training.model_seed).to(training.device).train()
        speed_up_pooling(self.model)
        self._state = OneState(self.model)
        self.exchange = Exchange(training, self.model)
        self._follow(training)
        self._step = Step(self._task, self.model)
        self._generator = torch.Generator()
        self.units = units_of(self._task)
        self.form = self.exchange.form

    def _follow(self, training: Training) -> None:
        """Apply the settings of a round."""
        self._training, self._local = training, training.local
        self._has_context = depends_on_context(self._task) or self._local.has_custom_optimizer
        trained = [p for p in self.model.parameters() if p.requires_grad]
        self._descent = Descent(self._local, trained, is_written_out=True)
        self.exchange.lr = self._local.lr

    def begin(self, version: Arrays, number: int = 0) -> None:
        """Set the version that the next clients train from; raise TaskMismatch if it belongs to another model."""
        if (training := self._training.at(number)) is not self._training:
            self._follow(training)
        self.exchange.begin(version)
        self._state.begin_round()

    def window(self, num_jobs: int) -> int:
        """Return the number of clients in a window: at most 1/16 of the cohort, so that processes can divide it."""
        return max(1, min(BLOCK_BYTES // max(1, self.form.row_bytes), num_jobs // 16))

    def train(self, jobs: Sequence[Job], rows: Rows) -> Iterator[Trained | Failed]:
        """Train one client after another, each into its row, on demand."""
        for index, job in enumerate(jobs):
            with naming(job.client_id):
                result = self.one(job, rows, index)
            yield result

    def one(self, job: Job, rows: Rows, index: int, examples: Examples | None = None) -> Trained | Failed:
        """Train one client, on its examples or on given ones, and write the result into a row."""
        examples = examples or self.examples(job.client_id)
        self._state.begin()
        control = self.exchange.load(job)
        seed_everything(job.seed)
        sizes = batch_sizes(examples.count, self._local.batch_size, model=self.model)
        requested = requested_steps(self._local, len(sizes))
        done = min(requested, job.steps or requested)
        with within(self._context(job)) if self._has_context else nullcontext():
            self._step.begin(self._descent, self.exchange.corrections(control))
            with lone_row_refused():
                self._run(examples, sizes, done, job.seed)
        try:
            with np.errstate(over="ignore", invalid="ignore"):
                update, own = self.exchange.write(rows, index, control, done)
        except NotFinite as error:
            return Failed(job.client_id, "not_finite", str(error))
        self._state.end()
        return Trained(
            job.client_id,
            update,
            self.units.weight(self._step.units, sizes, examples.count),
            done / requested,
            self._step.statistics(),
            own,
            report_of(self._training, done),
            rows.update[index],
        )

    def _context(self, job: Job) -> Context:
        return context_of(self._task, site=job.client_id, round=job.round_id, version=job.version, seed=job.seed)

    def _run(self, examples: Examples, sizes: list[int], num_steps: int, seed: int) -> None:
        tensors = examples.tensors
        for epoch, rows in islice(self._order(examples, sizes), num_steps):
            self._step([t[rows] for t in tensors] if tensors else examples.fetch(seed, epoch, rows), len(rows))

    def _order(self, examples: Examples, sizes: list[int]) -> Iterator[tuple[int, torch.Tensor]]:
        """Yield the epoch of each batch and its rows, or without tensors their positions, like a deployed client."""
        generator = self._generator if self._local.shuffle else None
        for epoch, order in enumerate(orders(examples.count, self._local.epochs, generator)):
            rows = order if examples.tensors is None else examples.rows(order)
            yield from ((epoch, part) for part in torch.split(rows, sizes))


def orders(count: int, epochs: int, generator: torch.Generator | None) -> Iterator[torch.Tensor]:
    """Yield the order of the examples in each epoch, as local training draws it after the seeding."""
    if generator is not None:
        generator.manual_seed(int(torch.randint(2**62, ())))
    for _ in range(epochs):
        yield torch.arange(count) if generator is None else torch.randperm(count, generator=generator)


def requested_steps(local: Any, steps_of_epoch: int) -> int:
    """Return the number of steps of one client without a deadline."""
    steps: int = local.epochs * steps_of_epoch
    return min(steps, local.max_steps or steps)


def report_of(training: Training, num_steps: int) -> dict[str, Any]:
    """Return a client's report after a number of steps, with FedNova's normalizer if needed."""
    report: dict[str, Any] = {"steps": num_steps}
    if training.algorithm == "fednova":
        counted = Normalizer(training.local)
        for _ in range(num_steps):
            counted.step()
        report |= {"normalizer": counted.normalizer, "effective_steps": counted.effective_steps}
    return report
