"""The client of a task in a ClientApp: trainings and evaluations as at an agent."""

from collections.abc import Mapping, Sequence
from typing import Any

from flwr.app import ArrayRecord, Context, Message, MetricRecord, RecordDict

from atoll.flower.exported.arrays import in_layout, moved
from atoll.flower.exported.loaded import ready_at
from atoll.flower.exported.run_values import RunValues
from atoll.flower.records import record_of
from atoll.task.arrays import Arrays, check_finite
from atoll.task.deadline import Deadline
from atoll.task.errors import TaskBroken
from atoll.task.metrics import only_finite
from atoll.task.randomness import training_seed
from atoll.training.worker.bench import Received

ARRAYS, CONFIG, METRICS, ROUND = "arrays", "config", "metrics", "server-round"
OWN = "atoll"
"""The record of the context's state with the tensors that stay at the node: local layers, an optimizer's state."""

EXAMPLES, UNIFORM = "num-examples", "uniform"
"""The two weights of a reply."""


class Client:
    """A task at the site of a node, for one message.

    Args:
        reference: the reference of the task.
        context: the context of the ClientApp: the run config, the node config, and the state that stays at the node.

    Raises:
        TaskBroken: the node config names no site.
        OverridesRefused: values of the run or the node do not fit the task; the message lists all faults.
    """

    def __init__(self, reference: str, context: Context) -> None:
        self._values = RunValues.read(context.run_config)
        self._state = context.state
        self._here = ready_at(reference, self._values, context.node_config)
        self._bench = self._here.bench

    def train(self, message: Message) -> Message:
        """Train from the model of a message; return the trained model, its weight, and the sums of the metrics.

        The seed is that of (run, round, site) in a run of Atoll, so the update is the same. There is no deadline: a
        straggler trains to its end, and Flower drops its reply after the timeout of the strategy.

        Raises:
            TaskMismatch: the message has the tensors of another model.
            NotFinite: the training left values that are not finite.
            TaskBroken: there are no data, or a metric has the name of a weight.
        """
        number, received = self._received(message)
        seed = training_seed(self._values.seed, self._values.run, number, self._here.site)
        request = self._request(number - 1) | {"seed": seed, "round_id": number, "algorithm": "fedavg"}
        request["has_counted"] = received.own is not None
        outcome = self._bench.train(received, request, Deadline.never())
        trained = outcome.trained
        check_finite(trained.update, "update")
        if outcome.own:
            self._state[OWN] = _record(outcome.own)
        content = RecordDict({METRICS: _metrics(trained.statistics, trained.num_examples)})
        content[ARRAYS] = _record(moved(received.version, trained.update))
        return Message(content=content, reply_to=message)

    def evaluate(self, message: Message) -> Message:
        """Evaluate the model of a message on the site's test data; return the sums of the metrics.

        Raises:
            TaskMismatch: the message has the tensors of another model.
            TaskBroken: there are no test data.
        """
        number, received = self._received(message)
        found = self._bench.evaluate(received, self._request(number) | {"split": "test"})
        if isinstance(found, str):
            raise TaskBroken(f"{self._here.site}: {found}")
        content = RecordDict({METRICS: _metrics(found, 1)})  # `Server.merged` adds the sums: no weight counts
        return Message(content=content, reply_to=message)

    def _received(self, message: Message) -> tuple[int, Received]:
        """Return the number of the round, and the tensors at its beginning."""
        content = message.content
        version = in_layout(content.array_records[ARRAYS], self._here.layout)
        own = self._state.array_records.get(OWN)
        return int(content.config_records[CONFIG][ROUND]), Received(version, None if own is None else _arrays(own))  # type: ignore[arg-type]

    def _request(self, version: int) -> dict[str, Any]:
        return {"version": version, "model_seed": self._values.seed, "local": dict(self._values.given)}


def _record(arrays: Arrays) -> ArrayRecord:
    return record_of(arrays, [*arrays], {})


def _arrays(record: ArrayRecord) -> Arrays:
    return {name: array.numpy() for name, array in record.items()}


def _metrics(statistics: Mapping[str, Sequence[float]], num_examples: float) -> MetricRecord:
    if taken := sorted({EXAMPLES, UNIFORM} & statistics.keys()):
        raise TaskBroken(f"the metric {', '.join(taken)} has the name of a weight of the reply: give it another one")
    sums = {name: list(numbers) for name, numbers in only_finite(statistics).items()}
    return MetricRecord({EXAMPLES: num_examples, UNIFORM: 1, **sums})
