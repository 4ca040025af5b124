"""The effort of a round for each client: steps of its local optimizer, and the seconds that its device needs."""

from collections.abc import Mapping
from functools import cached_property
from typing import Any

from atoll.protocol.vocabulary import ClientId
from atoll.simulations.devices.fleet import Device
from atoll.simulations.federation.trainings import Effort
from atoll.task.array_task import ArrayTask
from atoll.task.given import Given
from atoll.task.local import epoch_steps
from atoll.task.task import Task
from atoll.training.data.batches import batch_sizes
from atoll.training.model.parameters import build_model
from atoll.training.private.local_steps import PrivateTerms

LENGTHS = frozenset({"epochs", "batch_size", "max_steps"})
"""Local settings on which the length of a training depends."""


class Efforts:
    """Efforts of all clients, the same in every round, unless the length of a training has a schedule.

    Args:
        task: the task of the run.
        overrides: the settings of the run for the task (`task.given`).
        num_examples: the number of training examples of each client.
    """

    def __init__(
        self, task: Task | ArrayTask, overrides: Mapping[str, Any], num_examples: Mapping[ClientId, int]
    ) -> None:
        self.task, self._given, self._num_examples = task, Given.read(overrides), num_examples
        self._is_scheduled = not LENGTHS.isdisjoint(self._given.schedules)
        self._known: dict[ClientId, Effort] = {}
        self._version = 0

    def of(self, client_id: ClientId, device: Device, version: int) -> Effort:
        """Return the effort of a client on its device, in the round after a version."""
        if self._is_scheduled and version != self._version:
            self._known, self._version = {}, version
        if client_id not in self._known:
            self._known[client_id] = self._effort(self._num_examples[client_id], device)
        return self._known[client_id]

    def _effort(self, num_examples: int, device: Device) -> Effort:
        if not isinstance(self.task, Task):
            return Effort(num_examples, None, device.train_seconds(num_examples))
        local = self._given.local_of(self.task.local, self._version + 1)
        if self.task.fit is not None:
            return Effort(num_examples, None, device.train_seconds(num_examples * local.epochs))
        if (terms := PrivateTerms.read(self._given.private)) is not None:
            all_steps = local.epochs * epoch_steps(terms.sample_rate)
        else:
            all_steps = local.epochs * len(batch_sizes(num_examples, local.batch_size, model=self._model))
        steps = min(all_steps, local.max_steps or all_steps)
        return Effort(num_examples, steps, device.train_seconds(num_examples * local.epochs) * steps / all_steps)

    @cached_property
    def _model(self) -> Any:
        assert isinstance(self.task, Task)
        return build_model(self.task, 0)
