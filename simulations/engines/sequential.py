"""The engine of one process: a client after another, with the bits of a deployed client."""

import traceback
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Protocol

import torch

from atoll.parallel.array_bench import ArrayBench
from atoll.parallel.arrays import Arrays
from atoll.parallel.bench import Received
from atoll.parallel.deadline import Deadline
from atoll.parallel.errors import NotFinite
from atoll.parallel.model_bench import ModelBench
from atoll.parallel.task import Task
from atoll.simulations.engines.engine import ClientFailed, Failed, Job, Trained, Training
from atoll.simulations.engines.examples import ExamplesOf
from atoll.simulations.engines.loop import Loop
from atoll.simulations.engines.rows import Form, Rows

BLOCK_BYTES = 8 << 20
"""Of results that lie in one piece of memory."""


class Trainer(Protocol):
    """Trains clients into rows: in this process, or in each one of several."""

    form: Form | None
    """Of the results; None: they do not lie in rows."""

    def begin(self, version: Arrays) -> None:
        """Take the version that the next clients train from."""
        ...

    def train(self, job: Job, rows: Rows, index: int) -> Trained | Failed:
        """Train one client into its row."""
        ...


class Benches:
    """For tasks with a training of their own: each client at the bench that a deployed client has."""

    form = None

    def __init__(self, training: Training) -> None:
        self._training = training
        self._version: Arrays = {}

    def begin(self, version: Arrays) -> None:
        """Take the version."""
        self._version = version

    def train(self, job: Job, rows: Rows | None = None, index: int = 0) -> Trained | Failed:
        """Train one client. `job.steps` is how often its deadline may be asked before it has passed."""
        training = self._training
        request = {
            "site": job.client_id,
            "local": dict(training.overrides),
            "algorithm": training.algorithm,
            "device": training.device,
            "seed": job.seed,
            "model_seed": training.model_seed,
            "round_id": job.round_id,
        }
        task = training.task
        bench = ModelBench(task, request) if isinstance(task, Task) else ArrayBench(task, request)
        try:
            done = bench.train(Received(self._version, job.own), request, Asked(job.steps))
        except NotFinite as error:
            return Failed(job.client_id, "not_finite", str(error))
        found = done.trained
        statistics = {name: tuple(numbers) for name, numbers in found.statistics.items()}
        return Trained(
            job.client_id, found.update, found.num_examples, found.work, statistics, done.own, dict(done.report)
        )


class Asked(Deadline):
    """A deadline that has passed after it was asked for so often; None: it never comes."""

    def __init__(self, times: int | None) -> None:
        super().__init__(lambda: 0.0)
        self._left = times

    def passed(self) -> bool:
        """Whether it was asked for often enough."""
        if self._left is None:
            return super().passed()
        self._left -= 1
        return self._left < 0 or super().passed()


class Sequential:
    """One process.

    Args:
        training: of all clients.
        threads: of each operation; more than one may change bits. None: as torch is set.
        examples: of the clients; None: read here.
    """

    def __init__(self, training: Training, *, threads: int | None = 1, examples: ExamplesOf | None = None) -> None:
        self.name = "sequential" if training.device == "cpu" else f"sequential on {training.device}"
        self._threads = threads
        self._trainer: Trainer = trainer_of(training, examples)

    def train(self, version: Arrays, jobs: Sequence[Job]) -> Iterator[Trained | Failed]:
        """One after another, each when it is asked for."""
        self._trainer.begin(version)
        form = self._trainer.form
        at_once = rows_at_once(form)
        for first in range(0, len(jobs), at_once):
            chunk = jobs[first : first + at_once]
            rows = Rows(form or Form((), ()), len(chunk))
            for index, job in enumerate(chunk):
                with threads_of_torch(self._threads):
                    done = trained(self._trainer, job, rows, index)
                yield done

    def close(self) -> None:
        """Nothing runs."""


def trainer_of(training: Training, examples: ExamplesOf | None = None) -> Trainer:
    """The lean loop where the training is the built-in one, else the benches."""
    has_loop = isinstance(training.task, Task) and training.task.fit is None
    return Loop(training, examples) if has_loop else Benches(training)  # type: ignore[return-value]


def trained(trainer: Trainer, job: Job, rows: Rows, index: int) -> Trained | Failed:
    """One client's training; what fails in the task's code is told with the client.

    Raises:
        ClientFailed: with the traceback.
    """
    try:
        return trainer.train(job, rows, index)
    except Exception as error:
        detail = traceback.format_exc()
        raise ClientFailed(f"the training of client {job.client_id} failed:\n{detail}") from error


def rows_at_once(form: Form | None) -> int:
    """How many results share a piece of memory."""
    return 1 if form is None else max(1, BLOCK_BYTES // max(1, form.row_bytes))


@contextmanager
def threads_of_torch(threads: int | None) -> Iterator[None]:
    """Compute with so many threads, and leave their number as it was."""
    before = torch.get_num_threads()
    if threads not in (None, before):
        torch.set_num_threads(threads)
    try:
        yield
    finally:
        if threads not in (None, before):
            torch.set_num_threads(before)
