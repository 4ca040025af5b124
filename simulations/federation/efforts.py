"""What a round asks of each client: how many steps of its local optimizer, and how long its device takes for them."""

from collections.abc import Mapping
from functools import cached_property
from typing import Any

from atoll.parallel.local_training.batches import batch_sizes
from atoll.parallel.local_training.parameters import build_model
from atoll.parallel.task.array_task import ArrayTask
from atoll.parallel.task.local import Local
from atoll.parallel.task.task import Task
from atoll.protocol.vocabulary import ClientId
from atoll.simulations.devices.fleet import Device
from atoll.simulations.federation.trainings import Effort


class Efforts:
    """Those of all clients; of each the same in every round.

    Args:
        task: of the run.
        overrides: of its local settings.
        num_examples: of each client.
    """

    def __init__(
        self, task: Task | ArrayTask, overrides: Mapping[str, Any], num_examples: Mapping[ClientId, int]
    ) -> None:
        self._task, self._overrides, self._num_examples = task, overrides, num_examples
        self._known: dict[ClientId, Effort] = {}

    def of(self, client_id: ClientId, device: Device) -> Effort:
        """Of one client, on its device."""
        if client_id not in self._known:
            self._known[client_id] = self._effort(self._num_examples[client_id], device)
        return self._known[client_id]

    def _effort(self, num_examples: int, device: Device) -> Effort:
        if not isinstance(self._task, Task):
            return Effort(num_examples, None, device.train_seconds(num_examples))
        local = self._local
        if self._task.fit is not None:
            return Effort(num_examples, None, device.train_seconds(num_examples * local.epochs))
        whole = local.epochs * len(batch_sizes(num_examples, local.batch_size, model=self._model))
        steps = min(whole, local.max_steps or whole)
        return Effort(num_examples, steps, device.train_seconds(num_examples * local.epochs) * steps / whole)

    @cached_property
    def _model(self) -> Any:
        assert isinstance(self._task, Task)
        return build_model(self._task)

    @cached_property
    def _local(self) -> Local:
        assert isinstance(self._task, Task)
        return self._task.local.with_overrides(self._overrides)
