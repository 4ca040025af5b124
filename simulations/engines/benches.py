"""Tasks with a training of their own (a `fit`, an `ArrayTask`): each client at the bench that a deployed client has."""

from collections.abc import Iterator, Sequence

from atoll.parallel.local_training.parameters import build_model
from atoll.parallel.task.arrays import Arrays, layout_of
from atoll.parallel.task.deadline import Deadline
from atoll.parallel.task.errors import NotFinite
from atoll.parallel.task.task import Task
from atoll.parallel.worker.array_bench import ArrayBench
from atoll.parallel.worker.bench import Received
from atoll.parallel.worker.model_bench import ModelBench
from atoll.simulations.engines.engine import Failed, Job, Trained, Training, naming
from atoll.simulations.engines.rows import Form, Rows


class Benches:
    """Results do not lie in rows; `form` says which tensors there may be.

    Args:
        training: of all clients.
    """

    def __init__(self, training: Training) -> None:
        self._training = training
        self._version: Arrays = {}
        task = training.task
        if isinstance(task, Task):
            self.form = Form.of(build_model(task), keep=training.local.keep, algorithm=training.algorithm)
        else:
            self.form = Form(layout_of(task.initial(0)), ())

    def begin(self, version: Arrays) -> None:
        """Take the version."""
        self._version = version

    def window(self, num_jobs: int) -> int:
        """One."""
        return 1

    def train(self, jobs: Sequence[Job], rows: Rows) -> Iterator[Trained | Failed]:
        """Train one client after another. `steps` of a job is how often its deadline is asked before it has passed."""
        for job in jobs:
            with naming(job.client_id):
                result = self._one(job)
            yield result

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
        }
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
