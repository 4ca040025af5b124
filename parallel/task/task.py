"""The `Task` of a user, and the way to load it. Importing this file does not import torch."""

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeGuard

from atoll.parallel.task.array_task import ArrayTask, Instructions, Trained
from atoll.parallel.task.collated import CollatedData
from atoll.parallel.task.deadline import Deadline
from atoll.parallel.task.eager import step_without_compiler
from atoll.parallel.task.errors import TaskNotFound
from atoll.parallel.task.local import Local
from atoll.parallel.task.metrics import Metric
from atoll.parallel.task.reference import ReferenceNotFound, is_file, load_module, split

if TYPE_CHECKING:
    import torch

__all__ = [
    "ArrayTask",
    "Deadline",
    "Instructions",
    "Local",
    "Metric",
    "Task",
    "TaskNotFound",
    "Trained",
    "load_task",
    "task_name",
]


@dataclass(frozen=True, kw_only=True)
class Task:
    """A model, its data and its loss: the same object for a federation, a simulation and a centralized training.

        task = Task(
            model=make_model,
            data=load_site,
            loss=nn.functional.cross_entropy,
            sites=["north", "south", "east"],
            metrics={"accuracy": accuracy},
            local=Local(epochs=1, batch_size=16, lr=0.1),
            test_data=load_test,
        )

    Raises:
        ValueError: a field is of a wrong type; the message lists all faults.
    """

    model: "Callable[[], torch.nn.Module]"
    """() -> the model with its initial weights; `outputs = model(inputs)`."""

    data: Callable[[str, str], Any]
    """(site, split) -> map-style data set of (inputs, targets), split being "train" or "test"; None if the site has no
    such split."""

    loss: "Callable[[Any, Any], torch.Tensor]"
    """(outputs, targets) -> mean loss over the batch: over its examples, or over other units (tokens, weights)."""

    sites: Sequence[str] = ()
    """The owners of the data, for a simulation and a centralized training; an agent has exactly one, named in its
    settings."""

    metrics: Mapping[str, Metric | Callable[[Any, Any], Sequence[Any]]] = field(default_factory=dict)
    """Metrics by name: (outputs, targets) -> (total, count) of the batch, or a `Metric`. The loss is always measured,
    as (sum of mean loss x units, units); a metric named "loss" replaces it."""

    local: Local = field(default_factory=Local)
    """The settings of the local training; a run's TOML may override them."""

    test_data: Callable[[], Any] | None = None
    """() -> the server's data set, on which the coordinator measures every version; None: it measures none."""

    fit: Callable[[Any, Any, Local, Deadline], float] | None = None
    """(model, data, local, deadline) -> fraction of the work done, in (0, 1]: a training loop of your own (Lightning,
    Hugging Face) in place of the built-in one."""

    units: Callable[[Any], Any] | str | None = None
    """targets -> what the mean loss of a batch divides by, a number >= 0, not always whole: tokens that count, a sum
    of class weights. "sum": the loss is a sum over the examples. None: guessed, as the entries of whole-number targets
    that are not -100, else the examples."""

    collate: Callable[[list[Any]], Any] | None = None
    """rows -> the batch (inputs, targets), for rows that torch cannot stack as they are: dicts, triples, texts of
    different lengths, which are padded here. None: rows are (inputs, targets) of equal shapes."""

    def __post_init__(self) -> None:
        faults = list(_faults(self))
        if faults:
            raise ValueError("Task: " + "; ".join(faults))
        object.__setattr__(self, "sites", tuple(self.sites))
        if self.collate is not None:
            for name in ("data", "test_data"):
                given = getattr(self, name)
                if given is not None and not isinstance(given, CollatedData):  # `replace` has wrapped it already
                    object.__setattr__(self, name, CollatedData(given, self.collate))


def _faults(task: Task) -> Iterator[str]:
    for name in ("model", "data", "loss"):
        if not callable(getattr(task, name)):
            yield f"{name} must be callable, got {getattr(task, name)!r}"
    for name in ("test_data", "fit", "collate"):
        if getattr(task, name) is not None and not callable(getattr(task, name)):
            yield f"{name} must be callable or None, got {getattr(task, name)!r}"
    if not (task.units is None or task.units == "sum" or callable(task.units)):
        yield f'units must be a function of the targets, "sum" or None, got {task.units!r}'
    if not isinstance(task.local, Local):
        yield f"local must be a Local, got {task.local!r}"
    yield from _site_faults(task.sites)
    yield from _metric_faults(task.metrics)


def _site_faults(sites: object) -> Iterator[str]:
    if isinstance(sites, str) or not isinstance(sites, Sequence):
        yield f"sites must be a list of names, got {sites!r}"
        return
    yield from (f"sites: {site!r} is not a name" for site in sites if not (isinstance(site, str) and site))
    if len(set(map(repr, sites))) < len(sites):
        yield f"sites: names must differ, got {list(sites)!r}"


def _metric_faults(metrics: object) -> Iterator[str]:
    if not isinstance(metrics, Mapping):
        yield f"metrics must be a mapping from name to function, got {metrics!r}"
        return
    for name, metric in metrics.items():
        if not isinstance(name, str) or not (isinstance(metric, Metric) or callable(metric)):
            yield f"metrics: {name!r} must be a name with a function or a Metric, got {metric!r}"


def load_task(reference: str) -> Task | ArrayTask:
    """Return the task that `module:attribute` or `path/to/file.py:attribute` names.

    During the import the file's folder (for a module: the current folder) is first on `sys.path`, and last from then
    on: a task may import its neighbours, also later, and none of them shadows a module of ours. A file is loaded under
    a private name, so that a user's `server.py` or `client.py` collides with nothing.

    Raises:
        TaskNotFound: no such file, module or attribute, or the attribute is no task; the message lists the tasks there.
        Exception: any error that the task's module raises.
    """
    try:
        place, attribute = split(reference)
        module = load_module(reference)
    except ReferenceNotFound as error:
        raise TaskNotFound(str(error)) from error
    step_without_compiler()
    found = getattr(module, attribute, None)
    if is_task(found):
        return found
    tasks = [name for name, value in vars(module).items() if is_task(value) and not name.startswith("_")]
    what = f"{attribute} is a {type(found).__name__}" if hasattr(module, attribute) else f"there is no {attribute}"
    raise TaskNotFound(f"{reference}: {what} in {place} (tasks there: {', '.join(tasks) or 'none'})")


def task_name(reference: str) -> str:
    """Return the name on which a coordinator and its agents agree, wherever the file lies on each of their machines.

    `path/to/digits.py:task` becomes `digits:task`; `package.module:task` stays.

    Raises:
        TaskNotFound: the text has not the form of a reference.
    """
    try:
        place, attribute = split(reference)
    except ReferenceNotFound as error:
        raise TaskNotFound(str(error)) from error
    return f"{Path(place).stem if is_file(place) else place}:{attribute}"


def is_task(value: object) -> TypeGuard[Task | ArrayTask]:
    """Return whether a value is a `Task`, or an object that serves as an `ArrayTask`."""
    return isinstance(value, Task) or (isinstance(value, ArrayTask) and not isinstance(value, type))
