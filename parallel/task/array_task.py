"""The level below PyTorch: a client is an object that turns (global parameters, instructions) into an update."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, Protocol, runtime_checkable

from atoll.parallel.task.deadline import Deadline
from atoll.parallel.task.metrics import Statistics, as_statistics

if TYPE_CHECKING:
    import numpy as np

    Arrays = dict[str, np.ndarray[Any, Any]]


@dataclass(frozen=True, slots=True)
class Instructions:
    """What a client is asked to do in one round."""

    site: str
    """The owner of the data."""

    seed: int
    """For everything random in this training; a function of (run, round, client)."""

    round_id: int
    """The round, 1, 2, 3, ..."""

    deadline: Deadline
    """Ask `passed()` before each piece of work and hand in what there is when it has."""

    local: Mapping[str, Any] = field(default_factory=dict)
    """The run's overrides of the local training, as they were set; the task decides what they mean."""


@dataclass(frozen=True, slots=True)
class Trained:
    """The outcome of one local training."""

    update: "Arrays"
    """local - global, by name (Reddi et al. 2021, Algorithm 2): float32 or integers, the global model's shapes. All
    tensors of the model, or some, when the run takes updates in part (`aggregation.partial`)."""

    num_examples: int
    """Size of the site's data (n_k >= 1), the weight in FedAvg."""

    statistics: Mapping[str, Sequence[float]] = field(default_factory=dict)
    """Sufficient statistics of metrics, by name."""

    work: float = 1.0
    """Fraction of the requested work that was done, in (0, 1]."""


@runtime_checkable
class ArrayTask(Protocol):
    """A task in numpy arrays alone, for scikit-learn and everything else that is not PyTorch.

    Optional: `sites`, the owners, as in `Task`; a method
    `evaluate(parameters, *, split, site) -> statistics or None` for split "train" and "test" of a site and for
    "server" (site is None), None when there is no such data; a method `num_examples(site) -> int`; `metrics` with a
    `Metric` for each one whose value is not total / count.
    """

    def initial(self, seed: int) -> "Arrays":
        """The parameters that the first round starts from: float32 or integer arrays by name."""
        ...

    def train(self, parameters: "Arrays", instructions: Instructions) -> Trained:
        """Train on the site's own data, starting from the global parameters."""
        ...


def checked(trained: Trained) -> Trained:
    """The same with plain numbers.

    Raises:
        ValueError: something is not what it must be; all faults at once.
    """
    if not isinstance(trained, Trained):
        raise ValueError(f"train must return a Trained, got {type(trained).__name__}")
    faults = []
    if not (is_count(trained.num_examples) and trained.num_examples >= 1):
        faults.append(f"num_examples must be a whole number >= 1, got {trained.num_examples!r}")
    if not is_work(trained.work):
        faults.append(f"work must be in (0, 1], got {trained.work!r}")
    statistics: Statistics = {}
    try:
        statistics = as_statistics(trained.statistics)
    except ValueError as error:
        faults.append(str(error))
    if faults:
        raise ValueError("; ".join(faults))
    return Trained(trained.update, int(trained.num_examples), statistics, float(trained.work))


def is_count(value: Any) -> bool:
    """Whether it is a whole number, of Python or numpy, and not a bool."""
    return hasattr(value, "__index__") and not isinstance(value, bool)


def is_work(value: Any) -> bool:
    """Whether it is a number in (0, 1]."""
    return hasattr(value, "__float__") and not isinstance(value, bool) and 0 < float(value) <= 1
