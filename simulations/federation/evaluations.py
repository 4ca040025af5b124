"""Evaluation of model versions on the server's test data and on the clients'."""

from typing import Any

from atoll.client.session.events import EvaluationRequest
from atoll.parallel.task.array_task import ArrayTask
from atoll.parallel.task.metrics import Metrics, Statistics, sound
from atoll.parallel.task.randomness import data_of
from atoll.parallel.task.task import Task
from atoll.parallel.worker.bench import Bench, Received
from atoll.parallel.worker.benches import bench_of
from atoll.parallel.worker.model_bench import ModelBench
from atoll.protocol.bounded_mapping import BoundedMapping
from atoll.protocol.settings import ConfigError
from atoll.protocol.vocabulary import ClientId
from atoll.server.config.model import faults_of_metrics
from atoll.server.config.run import RunConfig
from atoll.server.files.versions import VersionFile
from atoll.simulations.federation.client_states import ClientStates
from atoll.simulations.federation.models import Models

BENCHES_MAX = 64
"""Maximum number of clients whose data stay loaded between evaluations."""


class Evaluations:
    """The measurements of the workers of coordinator and clients, made in this process.

    Args:
        task: the task of the run.
        request: the settings of a worker's request.
        versions: the versions of the model.
        states: the states of the clients.
    """

    def __init__(self, task: Task | ArrayTask, request: dict[str, Any], versions: Models, states: ClientStates) -> None:
        self._task, self._request, self._versions, self._states = task, request, versions, states
        self._server = bench_of(task, request)
        self._benches: BoundedMapping[ClientId, Bench] = BoundedMapping(BENCHES_MAX)
        self._sizes: dict[ClientId, int] = {}

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
        """Measure a version on the server's test data; return the sums, or the reason that there are none."""
        received = Received(self._versions.arrays(version.digest))
        asked = self._request | {"split": "server", "version": version.version}
        return self._sound(self._server.evaluate(received, asked))

    def of_client(self, client_id: ClientId, request: EvaluationRequest) -> Statistics | str:
        """Measure a version on a client's test data; return the sums, or the reason that there are none."""
        version = self._versions.version(request.version)
        state = self._states.find(client_id, request.counted_round)
        received = Received(self._versions.arrays(version.digest), state)
        asked = self._request | {"split": "test", "model_seed": request.model_seed, "version": request.version}
        return self._sound(self._bench(client_id).evaluate(received, asked))

    def num_examples(self, client_id: ClientId) -> int:
        """Return the number of a client's test examples."""
        if client_id not in self._sizes:
            data = data_of(self._task, client_id, "test") if isinstance(self._task, Task) else None
            self._sizes[client_id] = 0 if data is None else len(data)
        return self._sizes[client_id]

    def _bench(self, client_id: ClientId) -> Bench:
        if client_id not in self._benches:
            self._benches[client_id] = bench_of(self._task, self._request | {"site": client_id})
        return self._benches[client_id]

    def _sound(self, found: Statistics | str) -> Statistics | str:
        return found if isinstance(found, str) else sound(self._server.metrics, found)
