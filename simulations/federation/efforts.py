"""The effort of a round for each client: steps of its local optimizer, and the seconds that its device needs."""

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
    """The efforts of all clients, each the same in every round.

    Args:
        task: the task of the run.
        overrides: the run's overrides of the task's local settings.
        num_examples: the number of training examples of each client.
    """

    def __init__(
        self, task: Task | ArrayTask, overrides: Mapping[str, Any], num_examples: Mapping[ClientId, int]
    ) -> None:
        self._task, self._overrides, self._num_examples = task, overrides, num_examples
        self._known: dict[ClientId, Effort] = {}

    def of(self, client_id: ClientId, device: Device) -> Effort:
        """Return the effort of a client on its device."""
        if client_id not in self._known:
            self._known[client_id] = self._effort(self._num_examples[client_id], device)
        return self._known[client_id]

    def _effort(self, num_examples: int, device: Device) -> Effort:
        if not isinstance(self._task, Task):
            return Effort(num_examples, None, device.train_seconds(num_examples))
        local = self._local
        if self._task.fit is not None:
            return Effort(num_examples, None, device.train_seconds(num_examples * local.epochs))
        all_steps = local.epochs * len(batch_sizes(num_examples, local.batch_size, model=self._model))
        steps = min(all_steps, local.max_steps or all_steps)
        return Effort(num_examples, steps, device.train_seconds(num_examples * local.epochs) * steps / all_steps)

    @cached_property
    def _model(self) -> Any:
        assert isinstance(self._task, Task)
        return build_model(self._task, 0)

    @cached_property
    def _local(self) -> Local:
        assert isinstance(self._task, Task)
        return self._task.local.with_overrides(self._overrides)
