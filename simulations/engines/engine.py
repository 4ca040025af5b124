"""The interface of all engines: the jobs that a federation gives them, and the results that they return."""

import traceback
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, Protocol

import numpy as np

from atoll.protocol.value_type import value
from atoll.task.array_task import ArrayTask
from atoll.task.arrays import Arrays
from atoll.task.errors import TaskBroken
from atoll.task.given import Given
from atoll.task.local import Local
from atoll.task.metrics import Statistics
from atoll.task.task import Task
from atoll.training.local.algorithms import check_algorithm, check_training
from atoll.training.private.config import NOT_A_TASK
from atoll.training.private.local_steps import check_terms


@dataclass(frozen=True, kw_only=True)
class Training:
    """Settings of training that all clients of a run share.

    Raises:
        TaskBroken: the task does not allow the algorithm.
        ValueError: the task's `Local` does not have some of the overrides.
    """

    task: Task | ArrayTask

    overrides: Mapping[str, Any] = field(default_factory=dict)
    """Settings of the run for the task: see `task.given`."""

    version: int = 0
    """Version of the model that the clients train from."""

    algorithm: str = "fedavg"
    """Federated algorithm: fedavg, fednova or scaffold; FedProx and FedSGD are settings of `Local`."""

    device: str = "cpu"
    """Device on which the models compute: cpu or cuda."""

    model_seed: int = 0
    """Seed of the layers that stay at a client, before their first training."""

    run_number: int = 0
    """Number of the run, for Flower apps."""

    def __post_init__(self) -> None:
        if isinstance(self.task, Task):
            check_training(self.task, self.algorithm, self.local)
            check_terms(Given.read(self.overrides), self.task, self.algorithm)
        else:
            check_algorithm(self.algorithm, None)
            if self.is_private:
                raise TaskBroken(NOT_A_TASK)

    @property
    def local(self) -> Local:
        """The local training of the round after `version`, with the run's overrides.

        Raises:
            TaskBroken: the task is an `ArrayTask`, which interprets its overrides itself.
        """
        if not isinstance(self.task, Task):
            raise TaskBroken("an ArrayTask has no Local")
        return Given.read(self.overrides).local_of(self.task.local, self.version + 1)

    @property
    def is_private(self) -> bool:
        """Whether the run has a guarantee for examples, so that the steps are private."""
        return bool(Given.read(self.overrides).private)

    def at(self, version: int) -> "Training":
        """Return the settings for the round after another version; the same object if no setting has a schedule."""
        is_same = version == self.version or not any(isinstance(value, Mapping) for value in self.overrides.values())
        return self if is_same else replace(self, version=version)


@value
class Job:
    """Job of an engine: the training of one client."""

    client_id: str
    """Name of the client, a site of the task."""

    seed: int
    """Seed of all randomness in this training: `training_seed` of (run, round, client)."""

    steps: int | None = None
    """Maximum number of local steps (>= 1), as if a deadline stopped the training; None: all requested steps."""

    own: Arrays | None = None
    """State of the client after its last training; None: none yet."""

    round_id: int = 0
    """Number of the round, for an `ArrayTask` and the context of a task's functions."""

    version: int = 0
    """Version of the model that the client trains from; the same in all jobs of a cohort."""

    asked_at: float = 0.0
    """Instant of the invitation, for Flower apps [s since the epoch]."""

    def __post_init__(self) -> None:
        if self.steps is not None and self.steps < 1:
            raise ValueError(f"a job needs at least one step, got {self.steps} for {self.client_id}")


@value
class Trained:
    """Result of a client's training.

    The arrays may be views of memory that many clients share: copy them to keep them for long.
    """

    client_id: str

    update: Arrays
    """Local minus global tensors by name; with SCAFFOLD also the change of the control variate."""

    num_examples: int | float
    """The weight of the update in FedAvg, n_k: the number of the client's examples, or their units."""

    work: float
    """Steps done / steps requested, in (0, 1]."""

    statistics: Statistics
    """Sums of the loss and the task's metrics over the batches of the training."""

    own: Arrays
    """State that stays at the client: its control variate, local layers."""

    report: dict[str, Any]
    """Further values of the client's report: `steps`, and FedNova's `normalizer` and `effective_steps`."""

    row: np.ndarray[Any, Any] | None = None
    """All float32 tensors of `update` side by side (F,), in the canonical order of a version; the update's tensors are
    views of it. None: the update is not contiguous."""

    magnitudes: np.ndarray[Any, Any] | None = None
    """The largest |element| of each tensor of `row` (T,), float32; None: not measured."""


@value
class Failed:
    """Client without an update, because its training produced non-finite numbers, or its app failed."""

    client_id: str

    kind: str
    """Failure reason of the protocol: not_finite, or for an app any."""

    detail: str
    """Names of the tensors that are not finite, or the error of the app."""


class ClientFailed(RuntimeError):
    """Error: the task's code failed while a client trained or evaluated; the message has client and traceback."""


class naming:
    """Context that adds the clients' names to failures of the task's code; a generator would take twice the time.

    Args:
        clients: the names.
        work: a noun for their work.

    Raises:
        ClientFailed: the task's code failed; the message has the traceback.
    """

    __slots__ = ("_clients", "_work")

    def __init__(self, clients: str, work: str = "training") -> None:
        self._clients, self._work = clients, work

    def __enter__(self) -> None:
        """Enter the task's code."""

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: object) -> None:
        if isinstance(error, Exception) or kind is SystemExit:  # a subclass means the end of this process by a signal
            detail = "".join(traceback.format_exception(error))
            raise ClientFailed(f"the {self._work} of client {self._clients} failed:\n{detail}") from error


def last_line(error: Exception) -> str:
    """Return the last line of an error's message, or, without a message, its class."""
    return (str(error).strip().splitlines() or [type(error).__name__])[-1]


class Engine(Protocol):
    """Engine that trains and evaluates clients."""

    @property
    def name(self) -> str:
        """The name that `--engine` takes, with processes and device."""
        ...

    def train(self, version: Arrays, jobs: Sequence[Job]) -> Iterator[Trained | Failed]:
        """Train each job's client from the version's tensors, and yield the results in the order of the jobs.

        Results are computed on demand, so that a cohort need not fit into memory. An engine trains one cohort at a
        time.

        Raises:
            ClientFailed: the task's code failed.
            TaskMismatch: the version does not belong to the task's model.
        """
        ...

    def evaluate(self, version: Arrays, jobs: Sequence[Job]) -> list[Statistics | str]:
        """Measure the version's tensors on the test data of each job's client, combined with its local tensors.

        Args:
            version: the tensors.
            jobs: the clients, with the seed of the run's model; all of one version.

        Returns:
            The sums of the loss and the metrics, or the reason why there are none, in the order of the jobs. No other
            call may be in progress.

        Raises:
            ClientFailed: the task's code failed.
            TaskMismatch: the version does not belong to the task's model.
        """
        ...

    def close(self) -> None:
        """End all processes; a second call does nothing."""
        ...
