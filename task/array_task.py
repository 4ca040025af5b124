"""A task without PyTorch: an object that turns (global parameters, instructions) into an update."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, Protocol, runtime_checkable

from atoll.ground.faults import Refused
from atoll.task.context import Context
from atoll.task.deadline import Deadline
from atoll.task.metrics import Statistics, as_statistics
from atoll.tensors.updates.weight import as_weight

if TYPE_CHECKING:
    import numpy as np

    Arrays = dict[str, np.ndarray[Any, Any]]


@dataclass(frozen=True, slots=True)
class Instructions:
    """The request for one local training: the site, the round, and its deadline."""

    site: str
    """The owner of the data."""

    seed: int
    """The seed of all randomness in this training; a function of (run, round, client)."""

    round_id: int
    """The number of the round: 1, 2, 3, ..."""

    deadline: Deadline
    """The end of the training: check `deadline.passed()` before each piece of work, and return the update so far once
    it has passed."""

    local: Mapping[str, Any] = field(default_factory=dict)
    """The run's table of local settings (TOML `[local]`), unchecked: the task defines its keys. Settings with a
    schedule have their values in this round."""

    context: Context = field(default_factory=Context)
    """The context that a `Task`'s functions get, with the version of the model, the options and the site's settings."""


@dataclass(frozen=True, slots=True)
class Trained:
    """The result of one local training.

    Invalid values are refused by the worker, all at once, each with what is allowed.
    """

    update: "Arrays"
    """The difference local - global by name (Reddi et al. 2021, Algorithm 2): float32 or integer arrays in the global
    model's shapes. It has all tensors of the model, or some if the run accepts partial updates
    (`aggregation.partial`)."""

    num_examples: int | float
    """The size of the site's data, n_k > 0: the update's weight in FedAvg, of which only ratios matter. A number of
    examples, or a fraction: a sum of weights."""

    statistics: Mapping[str, Sequence[float]] = field(default_factory=dict)
    """Sufficient statistics of the metrics by name, for example `{"loss": (sum of losses, examples)}`."""

    work: float = 1.0
    """The fraction of the requested work that was done, in (0, 1]."""


@runtime_checkable
class ArrayTask(Protocol):
    """A task in numpy arrays, for scikit-learn and all other libraries that are not PyTorch.

    A class that has these methods is one; it inherits nothing:

        class Mean:
            sites = ("north", "south")

            def initial(self, seed):
                return {"mean": np.zeros(3, np.float32)}

            def train(self, parameters, instructions):
                rows = load(instructions.site)
                update = rows.mean(axis=0) - parameters["mean"]
                return Trained({"mean": update.astype(np.float32)}, num_examples=len(rows))

        task = Mean()

    Optional members:

    - `sites`: the owners of the data, as in `Task`.
    - `evaluate(parameters, *, split, site)`: return the statistics of the metrics by name, or None if there is no such
      data. The split is "train" or "test" of a site, or "server", where the site is None.
    - `num_examples(site)`: return the size of a site's training data.
    - `statistics(site, split)`: return numbers of a site's data by name, as `Task.statistics`, or None if there is no
      such data; a count named `examples` is the size of the split.
    - `metrics`: a `Metric` by name, for each value that is not total / count.
    - `options` and `settings`: values of a run and of a site by name, with their defaults, as in `Task`.

    `initial`, `evaluate`, `num_examples` and `statistics` may have a further parameter named `context`, in which they
    get the `Context`.
    """

    def initial(self, seed: int) -> "Arrays":
        """Return the parameters before the first round: float32 or integer arrays by name."""
        ...

    def train(self, parameters: "Arrays", instructions: Instructions) -> Trained:
        """Train on the site's data, starting from the global parameters, and return the update."""
        ...


def checked(trained: Trained) -> Trained:
    """Check a training's result, and return it with plain Python numbers.

    Raises:
        ValueError: a field is out of its range or of a wrong type; the message lists all faults.
    """
    if not isinstance(trained, Trained):
        raise ValueError(f"train must return a Trained, got {type(trained).__name__}")
    faults = []
    weight: int | float = 1
    if is_number(trained.num_examples):
        try:
            weight = as_weight(float(trained.num_examples))
        except ValueError as error:
            faults.append(f"num_examples: {error}")
    else:
        faults.append(f"num_examples must be a number > 0, got {trained.num_examples!r}")
    if not is_work(trained.work):
        faults.append(f"work must be in (0, 1], got {trained.work!r}")
    statistics: Statistics = {}
    try:
        statistics = as_statistics(trained.statistics)
    except ValueError as error:
        faults.append(str(error))
    if faults:
        raise Refused(*faults)
    return Trained(trained.update, weight, statistics, float(trained.work))


def is_number(value: Any) -> bool:
    """Return whether a value is a number of Python or numpy, and no bool."""
    return hasattr(value, "__float__") and not isinstance(value, bool)


def is_work(value: Any) -> bool:
    """Return whether a value is a number in (0, 1]."""
    return is_number(value) and 0 < float(value) <= 1
