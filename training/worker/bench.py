"""The `Bench`: a task loaded with one site's data, on which the worker process trains and evaluates."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Protocol, runtime_checkable

from atoll.task.array_task import Trained
from atoll.task.arrays import Arrays
from atoll.task.content import Content
from atoll.task.deadline import Deadline
from atoll.task.errors import TaskBroken
from atoll.task.metrics import Metrics, Statistics
from atoll.training.statistics.parts import SiteStatistics
from atoll.training.worker.warm_start import Aliases

Json = dict[str, Any]

PROCESS, ONE_JOB = "process", "one job"
"""The lifetime of a `Bench` (`warm` of its request): a process, or one job; absent: many jobs in a shared process."""


@dataclass(frozen=True, slots=True)
class Received:
    """The tensors at the start of a job."""

    version: Arrays
    """The tensors of the global model."""
    own: Arrays | None = None
    """The tensors that stay at this site; None before the first training."""


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
    """The names of the metrics, sorted; None: unknown, as the task's code names them."""
    why_not_here: str = ""
    """The reason why the server's data cannot be evaluated; empty: they can, as far as is known."""


class Bench(Protocol):
    """A task loaded with one site's data, on which the worker process trains and evaluates."""

    @property
    def metrics(self) -> Metrics:
        """The metrics, which turn statistics into values."""
        ...

    @property
    def grows(self) -> bool:
        """Return whether the tensors of the run's model grow by rows: a start file may have any number of rows."""
        ...

    def initial(self, seed: int) -> Arrays:
        """Return the tensors of version 0."""
        ...

    def frozen(self, seed: int) -> str:
        """Return the digest of the frozen tensors, which are not exchanged; empty: the model has none."""
        ...

    def adapter(self, seed: int) -> str:
        """Return the note on the PEFT adapter of the model, for the headers of versions, or ""."""
        ...

    def write_whole(self, out: Path, version: Path | None, seed: int, only: Sequence[str]) -> None:
        """Write tensors of the newly built model, or with a version's values; empty `only`: all."""
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
        """Train once from the received tensors, until the deadline at most."""
        ...

    def evaluate(self, arrays: Received, request: Json) -> Statistics | str:
        """Return the sums of the metrics of the received model on the request's split, or why there are none."""
        ...

    def measures(self) -> Measures:
        """Return the names of the metrics of an evaluation, and whether the server has data."""
        ...

    def statistics(self, request: Json, deadline: Deadline) -> SiteStatistics:
        """Return the statistics of the site's data, which need no model."""
        ...

    def no_statistics(self) -> str:
        """Return the reason why no site has statistics of its data; empty: there may be some."""
        ...


@runtime_checkable
class AppBench(Bench, Protocol):
    """The bench of a Flower app's ServerApp, whose `main()` contains a run."""

    def plan(self, nodes: int) -> Json:
        """Return the settings with which Atoll's rounds replace the app's server, or the reasons why they cannot."""
        ...

    def conclude(self, arrays: Arrays, history: Json) -> None:
        """Run `main()` to its end with the result of a run: the last version, and the metrics by round."""
        ...


@dataclass(frozen=True, slots=True)
class MessageAnswer:
    """The reply to a message, and the tensors that the site keeps until the next one."""

    content: Content
    own: Arrays | None = None


@runtime_checkable
class MessageBench(Protocol):
    """A bench (task loaded with a site's data) that answers the messages of a server program, too."""

    def message(self, content: Content, own: Arrays | None, request: Json) -> MessageAnswer:
        """Answer a message, from its content, the site's kept tensors, and its `kind`, `group` and `seed`."""
        ...


def only_declared(request: Json, declared: Mapping[str, Any]) -> Json:
    """Return a site's settings without its other tasks' settings, whose names the agent knows."""
    settings: Json = request.get("settings") or {}
    return {name: value for name, value in settings.items() if name in declared}


class AllTravels:
    """Mixin for the bench of a model that is exchanged whole: it has no frozen tensors and no adapter."""

    def frozen(self, seed: int) -> str:
        """Return "": all arrays are exchanged."""
        return ""

    def adapter(self, seed: int) -> str:
        """Return "": arrays have no adapter."""
        return ""

    def try_out(self) -> None:
        """Do nothing: a task of arrays has no batches that could be tried before its training."""

    def write_whole(self, out: Path, version: Path | None, seed: int, only: Sequence[str]) -> None:
        """Refuse: a version has all arrays.

        Raises:
            TaskBroken: always.
        """
        raise TaskBroken("the task is not a PyTorch Task: a version has all of its arrays")
