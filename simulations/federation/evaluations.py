"""Versions of the model on the server's own data, and on the clients'."""

from typing import Any

from atoll.client.session.events import EvaluationRequest
from atoll.parallel.task.array_task import ArrayTask
from atoll.parallel.task.metrics import Statistics
from atoll.parallel.task.task import Task
from atoll.parallel.worker.array_bench import ArrayBench
from atoll.parallel.worker.bench import Bench, Received
from atoll.parallel.worker.model_bench import ModelBench
from atoll.protocol.bounded_mapping import BoundedMapping
from atoll.protocol.settings import ConfigError
from atoll.protocol.vocabulary import ClientId
from atoll.server.files.versions import VersionFile
from atoll.simulations.federation.models import Models
from atoll.simulations.federation.own import OwnStates

BENCHES_MAX = 64
"""Clients whose data stay loaded from one evaluation to the next."""


class Evaluations:
    """As a worker of the coordinator, and those of the clients, would measure; here, in this process."""

    def __init__(self, task: Task | ArrayTask, request: dict[str, Any], versions: Models, own: OwnStates) -> None:
        self._task, self._request, self._versions, self._own = task, request, versions, own
        self._server = bench_of(task, request)
        self._benches: BoundedMapping[ClientId, Bench] = BoundedMapping(BENCHES_MAX)
        self._sizes: dict[ClientId, int] = {}

    def check(self, server_every: int) -> None:
        """That the server, which is to measure every so many versions, can: data without an example are a mistake.

        Raises:
            ConfigError: it cannot.
        """
        if server_every and isinstance(self._server, ModelBench) and self._server.is_empty("server"):
            what = f"got {server_every}, and the task's test_data has no examples; allowed: 0, or data to measure on"
            raise ConfigError([f"evaluation.server_every: {what}"])

    def of_server(self, version: VersionFile) -> Statistics | str:
        """On the server's own data; or why there are none."""
        received = Received(self._versions.arrays(version.digest))
        return self._server.evaluate(received, self._request | {"split": "server"})

    def of_client(self, client_id: ClientId, request: EvaluationRequest) -> Statistics | str:
        """On a client's own test data; or why there are none."""
        version = self._versions.version(request.version)
        own = self._own.find(client_id, request.counted_round)
        received = Received(self._versions.arrays(version.digest), own)
        asked = self._request | {"split": "test", "model_seed": request.model_seed}
        return self._bench(client_id).evaluate(received, asked)

    def num_examples(self, client_id: ClientId) -> int:
        """Of a client's test data."""
        if client_id not in self._sizes:
            data = self._task.data(client_id, "test") if isinstance(self._task, Task) else None
            self._sizes[client_id] = 0 if data is None else len(data)
        return self._sizes[client_id]

    def _bench(self, client_id: ClientId) -> Bench:
        if client_id not in self._benches:
            self._benches[client_id] = bench_of(self._task, self._request | {"site": client_id})
        return self._benches[client_id]


def bench_of(task: Task | ArrayTask, request: dict[str, Any]) -> Bench:
    """As `parallel.worker_ops` makes one."""
    return ModelBench(task, request) if isinstance(task, Task) else ArrayBench(task, request)
