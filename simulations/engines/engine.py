"""What every engine is asked and what it answers; the federation around it need not know which engine it has."""

import traceback
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Protocol

import numpy as np

from atoll.parallel.local_training.algorithms import check_algorithm
from atoll.parallel.task.array_task import ArrayTask
from atoll.parallel.task.arrays import Arrays
from atoll.parallel.task.errors import TaskBroken
from atoll.parallel.task.local import Local
from atoll.parallel.task.metrics import Statistics
from atoll.parallel.task.task import Task
from atoll.protocol.value_type import value


@dataclass(frozen=True, kw_only=True)
class Training:
    """What all clients of a run have in common.

    Raises:
        TaskBroken: the algorithm cannot be carried out with this task.
        ValueError: overrides that the task's `Local` does not know.
    """

    task: Task | ArrayTask

    overrides: Mapping[str, Any] = field(default_factory=dict)
    """The run's `[local]`, as it was set."""

    algorithm: str = "fedavg"
    """fedavg, fednova or scaffold; FedProx and FedSGD are settings of `Local`."""

    device: str = "cpu"
    """Where the models compute: cpu or cuda."""

    model_seed: int = 0
    """Of the layers that stay at a client, before it has trained them for the first time."""

    def __post_init__(self) -> None:
        has_fit = getattr(self.task, "fit", None) is not None
        check_algorithm(self.algorithm, self.local if isinstance(self.task, Task) else None, has_fit=has_fit)

    @property
    def local(self) -> Local:
        """The local training of one round, with the run's overrides.

        Raises:
            TaskBroken: an `ArrayTask` has none; it alone knows what its overrides mean.
        """
        if not isinstance(self.task, Task):
            raise TaskBroken("an ArrayTask has no Local")
        return self.task.local.with_overrides(self.overrides)


@value
class Job:
    """One client that is to train."""

    client_id: str
    """Its site in the task."""

    seed: int
    """Of everything random in this training: `server.messages.training_seed` of (run, round, client)."""

    steps: int | None = None
    """At most so many local steps (>= 1), as if its deadline came then; None: all that are requested."""

    own: Arrays | None = None
    """What stayed at this client after its last training; None: nothing yet."""

    round_id: int = 0
    """For tasks that ask for it (an `ArrayTask`)."""

    def __post_init__(self) -> None:
        if self.steps is not None and self.steps < 1:
            raise ValueError(f"a job needs at least one step, got {self.steps} for {self.client_id}")


@value
class Trained:
    """What a client would send. The arrays may be views of memory that many clients share: copy what is to be kept
    for long."""

    client_id: str

    update: Arrays
    """local - global by name; with SCAFFOLD also what its control variate has changed by."""

    num_examples: int
    """n_k, the size of its data."""

    work: float
    """Steps done / steps requested, in (0, 1]."""

    statistics: Statistics
    """Of the loss and the task's metrics over the batches seen."""

    own: Arrays
    """What stays at the client: its control variate, layers of its own."""

    report: dict[str, Any]
    """What else the client says: `steps`, and FedNova's `normalizer` and `effective_steps`."""

    row: np.ndarray[Any, Any] | None = None
    """All float32 tensors of `update` side by side, (F,) in the canonical order of a version; they are views of it.
    None where an update does not lie in one piece."""

    magnitudes: np.ndarray[Any, Any] | None = None
    """The largest |element| of each tensor of `row`, (T,) float32; None where nobody has looked."""


@value
class Failed:
    """A client whose update cannot be sent, because it has left the finite numbers."""

    client_id: str

    kind: str
    """In the protocol's words: not_finite."""

    detail: str
    """Which tensors."""


class ClientFailed(RuntimeError):
    """The task's own code failed while a client trained; the message has the client and the traceback."""


class naming:
    """Tell what fails in the task's code with the clients that trained; as a generator it would take twice the time.

    Raises:
        ClientFailed: with the traceback.
    """

    __slots__ = ("_clients",)

    def __init__(self, clients: str) -> None:
        self._clients = clients

    def __enter__(self) -> None:
        """The task's code follows."""

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: object) -> None:
        if isinstance(error, Exception):
            detail = "".join(traceback.format_exception(error))
            raise ClientFailed(f"the training of client {self._clients} failed:\n{detail}") from error


class Engine(Protocol):
    """Trains clients."""

    @property
    def name(self) -> str:
        """As `--engine` has it, with what it runs on."""
        ...

    def train(self, version: Arrays, jobs: Sequence[Job]) -> Iterator[Trained | Failed]:
        """Train each job's client from the version's tensors; the results come in the order of the jobs.

        They come as they are needed, so that a cohort need not fit into memory. An engine trains one cohort at a time.

        Raises:
            ClientFailed: the task's own code failed.
            TaskMismatch: the version does not belong to the task's model.
        """
        ...

    def close(self) -> None:
        """End whatever runs; a second time does nothing."""
        ...
