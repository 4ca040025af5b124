"""The server of a task in a ServerApp: the initial model, the metrics of all clients, the last model."""

from collections.abc import Sequence
from pathlib import Path

from flwr.app import ArrayRecord, Context, MetricRecord, RecordDict

from atoll.flower.exported.arrays import in_layout
from atoll.flower.exported.loaded import ready_at
from atoll.flower.exported.run_values import RunValues
from atoll.flower.records import record_of
from atoll.task.metrics import Statistics, merge, only_finite, values
from atoll.tensors import safetensors_file
from atoll.tensors.layout import BESIDE
from atoll.training.worker.bench import Received
from atoll.training.worker.warm_start import Start, started


class Server:
    """The server's side of an exported task, in a ServerApp.

    Args:
        reference: the reference of the task.
        context: the context of the ServerApp: the run config.

    Raises:
        OverridesRefused: values of the run do not fit the task; the message lists all faults.
    """

    def __init__(self, reference: str, context: Context) -> None:
        self._values = RunValues.read(context.run_config)
        self._here = ready_at(reference, self._values, None)
        self._bench = self._here.bench

    @property
    def num_rounds(self) -> int:
        """The number of rounds."""
        return self._values.rounds

    def initial(self) -> ArrayRecord:
        """Return version 0: the task's initial tensors, or the tensors of the file that `start` names.

        Raises:
            StartRefused: the file does not fit the model; the message lists all faults.
        """
        arrays = self._bench.initial(self._values.seed)
        if self._values.start:
            start = Start(Path(self._values.start), self._values.is_strict)
            arrays = started(arrays, self._bench.aliases(), start).arrays
        return record_of(arrays, [*arrays], {})

    def merged(self, records: Sequence[RecordDict], weighted_by: str) -> MetricRecord:
        """Return the metrics over all clients, from their added sums: no mean of the clients' values.

        Args:
            records: the contents of the replies.
            weighted_by: not used: Flower hands it to each such function.
        """
        sums = [
            {name: tuple(numbers) for name, numbers in record.items() if isinstance(numbers, list)}
            for content in records
            for record in content.metric_records.values()
        ]
        return self._measured(merge(sums))

    def evaluate(self, server_round: int, arrays: ArrayRecord) -> MetricRecord | None:
        """Return the metrics of a version on the task's `test_data`; None: the task has no test data."""
        received = Received(in_layout(arrays, self._here.layout))
        request = {"split": "server", "version": server_round, "model_seed": self._values.seed}
        found = self._bench.evaluate(received, request | {"local": dict(self._values.given)})
        return None if isinstance(found, str) else self._measured(only_finite(found))

    def save(self, arrays: ArrayRecord, path: str) -> None:
        """Write the model of a version as a safetensors file, from which a run of Atoll can start."""
        every = in_layout(arrays, self._here.layout)
        model = {name: array for name, array in every.items() if not name.startswith(BESIDE)}
        safetensors_file.write(Path(path).absolute(), model)

    def _measured(self, sums: Statistics) -> MetricRecord:
        """Compute the metrics from their sums, without undefined values."""
        found = values(self._bench.metrics, sums)
        return MetricRecord({name: value for name, value in found.items() if value is not None})
