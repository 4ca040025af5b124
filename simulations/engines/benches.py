"""The trainer for tasks with a custom training or algorithm: the bench of a deployed worker."""

from collections.abc import Iterator, Sequence
from dataclasses import replace
from functools import cached_property

from torch.utils.data import TensorDataset

from atoll.simulations.engines.engine import Failed, Job, Trained, Training, naming
from atoll.simulations.engines.examples import Examples
from atoll.simulations.engines.rows import Form, Rows
from atoll.task.apps import AppTask
from atoll.task.arrays import Arrays, layout_of
from atoll.task.context import context_of, within
from atoll.task.deadline import Deadline
from atoll.task.errors import NotFinite
from atoll.task.task import Task
from atoll.training.model.as_built import AsBuilt
from atoll.training.model.parameters import build_model
from atoll.training.worker.bench import ONE_JOB, Received
from atoll.training.worker.benches import bench_of
from atoll.training.worker.operations import detail_of, kind_of


class Benches:
    """Trainer whose results are not rows.

    Args:
        training: the settings of all clients' training.
    """

    def __init__(self, training: Training) -> None:
        self._training = training
        self._version: Arrays = {}
        self._number = 0
        self._process = AsBuilt({}, with_process=True)
        """Flags of this process, which a custom training loop may leave changed for the next client."""

    @cached_property
    def form(self) -> Form:
        """The tensors of a result; for an `ArrayTask`, whose model is built for this, only the update's."""
        training, task = self._training, self._training.task
        if isinstance(task, Task):
            model = build_model(task, training.model_seed)
            return Form.of(model, local=training.local, algorithm=training.algorithm, own=task.algorithm)
        with within(context_of(task)):
            return Form(layout_of(task.initial(0)), ())

    def begin(self, version: Arrays, number: int = 0) -> None:
        """Set the version that the next clients train from."""
        self._version, self._number = version, number

    def window(self, num_jobs: int) -> int:
        """Return 1: each client has a separate window."""
        return 1

    def train(self, jobs: Sequence[Job], rows: Rows) -> Iterator[Trained | Failed]:
        """Train one client after another; a job's `steps` limit how often its deadline is checked before it passes."""
        for job in jobs:
            with naming(job.client_id):
                result = self._one(job)
            yield result

    def one(self, job: Job, rows: Rows, index: int, examples: Examples | None = None) -> Trained | Failed:
        """Train one client, on its own examples or on given ones in tensors."""
        if examples is None:
            return self._one(job)
        assert isinstance(self._training.task, Task)
        given = TensorDataset(*(examples.tensors or ()))
        other = Benches(replace(self._training, task=replace(self._training.task, data=lambda site, split: given)))
        other.begin(self._version, self._number)
        return other._one(job)

    def _one(self, job: Job) -> Trained | Failed:
        training, task = self._training, self._training.task
        request = {
            "site": job.client_id,
            "local": dict(training.overrides),
            "algorithm": training.algorithm,
            "device": training.device,
            "seed": job.seed,
            "model_seed": training.model_seed,
            "round_id": job.round_id,
            "run_number": training.run_number,
            "asked_at": job.asked_at,
            "version": self._number,
            "warm": ONE_JOB,
        }
        bench = bench_of(task, request)
        try:
            outcome = bench.train(Received(self._version, job.own), request, CountedDeadline(job.steps))
        except NotFinite as error:
            return Failed(job.client_id, "not_finite", str(error))
        except (Exception, SystemExit) as error:
            if not isinstance(task, AppTask):
                raise
            return Failed(job.client_id, kind_of(error, "train"), detail_of(error))  # the process continues
        finally:
            self._process.restore()
        trained = outcome.trained
        statistics = {name: tuple(numbers) for name, numbers in trained.statistics.items()}
        return Trained(
            job.client_id,
            trained.update,
            trained.num_examples,
            trained.work,
            statistics,
            outcome.own,
            dict(outcome.report),
        )


class CountedDeadline(Deadline):
    """Deadline that passes after a number of checks; None: never."""

    def __init__(self, times: int | None) -> None:
        super().__init__(lambda: 0.0)
        self._left = times

    def passed(self) -> bool:
        """Count a check, and return whether the deadline has passed."""
        if self._left is None:
            return super().passed()
        self._left -= 1
        return self._left < 0 or super().passed()
