"""A task and a site, ready for work: what a worker process asks of either kind of task."""

from dataclasses import dataclass, field
from typing import Any, Protocol

from atoll.parallel.task.array_task import Trained
from atoll.parallel.task.arrays import Arrays
from atoll.parallel.task.deadline import Deadline
from atoll.parallel.task.metrics import Metrics, Statistics

Json = dict[str, Any]


@dataclass(frozen=True, slots=True)
class Received:
    """The tensors that a job begins with."""

    version: Arrays
    """Of the global model."""
    own: Arrays | None = None
    """What this site has kept for itself; None: nothing yet."""


@dataclass(frozen=True, slots=True)
class Outcome:
    """What a training has come to."""

    trained: Trained
    report: Json
    """What else the answer says."""
    own: Arrays = field(default_factory=dict)
    """What stays at the site: a control variate, layers of its own."""


class Bench(Protocol):
    """One task and one site, ready for work."""

    @property
    def metrics(self) -> Metrics:
        """How statistics become values."""
        ...

    def initial(self, seed: int) -> Arrays:
        """The tensors of version 0."""
        ...

    def buffers(self) -> list[str]:
        """Float tensors of the model that are not trained."""
        ...

    def num_examples(self) -> int | None:
        """Size of the site's training data; None when it is not known, or there is no site."""
        ...

    def train(self, arrays: Received, request: Json, deadline: Deadline) -> Outcome:
        """One training."""
        ...

    def evaluate(self, arrays: Received, request: Json) -> Statistics | str:
        """Statistics of these parameters on the request's split, or why there are none."""
        ...
