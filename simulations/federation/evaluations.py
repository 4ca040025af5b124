"""Evaluation of model versions on the server's test data and on the clients'."""

from collections.abc import Mapping
from typing import Any

from atoll.client.session.events import EvaluationRequest
from atoll.protocol.settings import ConfigError
from atoll.protocol.vocabulary import ClientId, Version
from atoll.server.config.model import faults_of_metrics
from atoll.server.config.run import RunConfig
from atoll.server.files.versions import VersionFile
from atoll.simulations.engines.engine import Engine, Job
from atoll.simulations.federation.client_states import ClientStates
from atoll.simulations.federation.models import Models
from atoll.task.array_task import ArrayTask
from atoll.task.metrics import Metrics, Statistics, sound
from atoll.task.task import Task
from atoll.training.worker.bench import Received
from atoll.training.worker.benches import bench_of
from atoll.training.worker.model_bench import ModelBench


class Evaluations:
    """Evaluations of coordinator and clients, with the results that their workers would give.

    Evaluations on the server's data run in this process; clients that were asked at the same time are evaluated in one
    call of the engine.

    Args:
        task: the task of the run.
        request: the settings of a worker's request.
        versions: the versions of the model.
        states: the states of the clients.
        sizes: the number of test examples of each client; None: the task reads its data itself.
    """

    def __init__(
        self,
        task: Task | ArrayTask,
        request: dict[str, Any],
        versions: Models,
        states: ClientStates,
        sizes: Mapping[ClientId, int] | None = None,
    ) -> None:
        self._task, self._request, self._versions, self._states = task, request, versions, states
        self._server = bench_of(task, request)
        self._asked: dict[ClientId, EvaluationRequest] = {}
        self._found: dict[ClientId, Statistics | str] = {}
        self._version: Version | None = None
        self._sizes = sizes or {}

    @property
    def metrics(self) -> Metrics:
        """The task's metrics."""
        return self._server.metrics

    def check(self, config: RunConfig) -> None:
        """Check that the server has test data if it measures versions, and that the metrics of the settings exist.

        Raises:
            ConfigError: the test data has no examples; the task does not measure a metric that decides about the run.
        """
        if config.rules.watched and (
            faults := [*faults_of_metrics(config.model, config.stop, self._server.measures())]
        ):
            raise ConfigError(faults)
        server_every = config.evaluation.server_every
        if server_every and isinstance(self._server, ModelBench) and self._server.is_empty("server"):
            what = f"got {server_every}, and the task's test_data has no examples; allowed: 0, or data to measure on"
            raise ConfigError([f"evaluation.server_every: {what}"])

    def of_server(self, version: VersionFile) -> Statistics | str:
        """Measure a version on the server's test data; return the sums, or the reason why there are none."""
        received = Received(self._versions.arrays(version.digest))
        asked = self._request | {"split": "server", "version": version.version}
        return self._sound(self._server.evaluate(received, asked))

    def ask(self, client_id: ClientId, request: EvaluationRequest) -> None:
        """Record that a client will evaluate a version, and drop its earlier requests."""
        if request.version != self._version:
            self._version, self._asked, self._found = request.version, {}, {}
        self._asked[client_id] = request

    def of_client(self, engine: Engine, client_id: ClientId, request: EvaluationRequest) -> Statistics | str:
        """Return the sums of a version on a client's test data, or the reason why there are none.

        The engine measures all requested clients when the first result is needed. The results do not depend on this
        time, because a client uses its state after the last counted round.
        """
        self.ask(client_id, request)
        if client_id not in self._found:
            asked, self._asked = self._asked, {}
            jobs = [self._job(name, each) for name, each in asked.items()]
            arrays = self._versions.arrays(self._versions.version(request.version).digest)
            self._found |= zip(asked, map(self._sound, engine.evaluate(arrays, jobs)), strict=True)
        return self._found.pop(client_id)

    def _job(self, client_id: ClientId, request: EvaluationRequest) -> Job:
        own = self._states.find(client_id, request.counted_round)
        return Job(client_id, request.model_seed, own=own, version=int(request.version), asked_at=request.asked_at)

    def num_examples(self, client_id: ClientId) -> int:
        """Return the number of a client's test examples."""
        return self._sizes.get(client_id, 0)

    def _sound(self, found: Statistics | str) -> Statistics | str:
        return found if isinstance(found, str) else sound(self._server.metrics, found)
