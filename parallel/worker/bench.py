"""The bench, a task with one site ready for work: the interface of both kinds of task to the worker process."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Protocol, runtime_checkable

from atoll.parallel.local_training.warm_start import Aliases
from atoll.parallel.statistics.parts import SiteStatistics
from atoll.parallel.task.array_task import Trained
from atoll.parallel.task.arrays import Arrays
from atoll.parallel.task.content import Content
from atoll.parallel.task.deadline import Deadline
from atoll.parallel.task.errors import TaskBroken
from atoll.parallel.task.metrics import Metrics, Statistics

Json = dict[str, Any]

PROCESS, ONE_JOB = "process", "one job"
"""The life of a bench (`warm` of its request): a process, or one job; absent: many jobs in the process of others."""


@dataclass(frozen=True, slots=True)
class Received:
    """The tensors at the beginning of a job."""

    version: Arrays
    """The tensors of the global model."""
    own: Arrays | None = None
    """The tensors that this site has stored for itself; None before the first training."""


@dataclass(frozen=True, slots=True)
class Outcome:
    """The results of one training."""

    trained: Trained
    report: Json
    """Further fields of the answer."""
    own: Arrays = field(default_factory=dict)
    """The tensors that stay at the site: a control variate, local layers."""


@dataclass(frozen=True, slots=True)
class Measures:
    """The metrics of an evaluation, known before the first one."""

    names: tuple[str, ...] | None
    """The names of the metrics, sorted; None: unknown, as the task's own code names them."""
    why_not_here: str = ""
    """The reason that the server's data cannot be measured; empty: they can, as far as is known."""


class Bench(Protocol):
    """One task and one site, ready for work."""

    @property
    def metrics(self) -> Metrics:
        """The metrics, which turn statistics into values."""
        ...

    @property
    def grows(self) -> bool:
        """Return whether the tensors of the run's model grow by rows: a file to start from may have any number."""
        ...

    def initial(self, seed: int) -> Arrays:
        """Return the tensors of version 0."""
        ...

    def frozen(self, seed: int) -> str:
        """Return the digest of the model's tensors that do not travel; empty: all travel."""
        ...

    def adapter(self, seed: int) -> str:
        """Return the note on the PEFT adapter of the model, for the headers of versions; empty: it has none."""
        ...

    def write_whole(self, out: Path, version: Path | None, seed: int, only: Sequence[str]) -> None:
        """Write tensors of the model as it is built, or with a version's; empty `only`: all."""
        ...

    def settings(self) -> list[str]:
        """Return the names of the site's settings that the task declares."""
        ...

    def aliases(self) -> Aliases:
        """Return the names of the tied tensors of the model."""
        ...

    def buffers(self) -> list[str]:
        """Return the names of the model's float tensors that are not trained."""
        ...

    def num_examples(self) -> int | None:
        """Return the size of the site's training data; None if it is unknown, or there is no site."""
        ...

    def try_out(self) -> None:
        """Try the task on a batch of the site's data, or of the server's; raise TaskBroken if it cannot be used."""
        ...

    def train(self, arrays: Received, request: Json, deadline: Deadline) -> Outcome:
        """Train once, from these tensors, until the deadline at most."""
        ...

    def evaluate(self, arrays: Received, request: Json) -> Statistics | str:
        """Return the statistics of these parameters on the request's split, or the reason why there are none."""
        ...

    def measures(self) -> Measures:
        """Return what an evaluation measures."""
        ...

    def statistics(self, request: Json, deadline: Deadline) -> SiteStatistics:
        """Return the statistics of the site's data, which no model takes part in."""
        ...

    def no_statistics(self) -> str:
        """Return the reason that no site has statistics of its data; empty: there may be some."""
        ...


@runtime_checkable
class AppBench(Bench, Protocol):
    """A Flower app, ready for work: its ServerApp has a `main()`, of which a run is a part."""

    def plan(self, nodes: int) -> Json:
        """Return how the app runs natively with this number of clients, or the reasons that it cannot."""
        ...

    def conclude(self, arrays: Arrays, history: Json) -> None:
        """Let `main()` go on to its end with the result of a run: the last version, and the metrics by round."""
        ...


@dataclass(frozen=True, slots=True)
class MessageAnswer:
    """The reply to a message, and what the site keeps until the next one."""

    content: Content
    own: Arrays | None = None


@runtime_checkable
class MessageBench(Protocol):
    """A bench that answers the messages of a server program, too."""

    def message(self, content: Content, own: Arrays | None, request: Json) -> MessageAnswer:
        """Answer a message: its content, the site's own tensors after the last one, and its `kind`, `group`, `seed`."""
        ...


def only_declared(request: Json, declared: Mapping[str, Any]) -> Json:
    """Return a site's settings without those of its other tasks, of which the agent knows the names."""
    settings: Json = request.get("settings") or {}
    return {name: value for name, value in settings.items() if name in declared}


class AllTravels:
    """The answers of a bench whose arrays all travel."""

    def frozen(self, seed: int) -> str:
        """Return nothing: all arrays travel."""
        return ""

    def adapter(self, seed: int) -> str:
        """Return nothing: arrays have no adapter."""
        return ""

    def try_out(self) -> None:
        """Try nothing: a task of arrays has no batches that could be tried before its own training."""

    def write_whole(self, out: Path, version: Path | None, seed: int, only: Sequence[str]) -> None:
        """Refuse: a version has all arrays.

        Raises:
            TaskBroken: always.
        """
        raise TaskBroken("the task is no Task in PyTorch: a version has all of its arrays")
