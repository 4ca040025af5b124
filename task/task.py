"""The `Task` of a user, and the way to load it. Importing this file does not import torch."""

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeGuard

from atoll.ground.faults import Refused
from atoll.ground.process.loading import loading
from atoll.plugins.reference import ReferenceNotFound, is_file, load_module, split
from atoll.task.algorithm import Algorithm, algorithm_faults
from atoll.task.apps import framework, is_app
from atoll.task.array_task import ArrayTask, Instructions, Trained
from atoll.task.base import Base, travelling_faults
from atoll.task.collated import CollatedData
from atoll.task.context import Context, context_of, contextual
from atoll.task.deadline import Deadline
from atoll.task.eager import step_without_compiler
from atoll.task.errors import TaskNotFound
from atoll.task.given import Plain, value_faults, with_tables, with_values
from atoll.task.local import Local
from atoll.task.metrics import METRICS_MAX, Metric, is_name, name_fault
from atoll.task.overrides import OverridesRefused

if TYPE_CHECKING:
    import torch

__all__ = [
    "ArrayTask",
    "Base",
    "Context",
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

    `model`, `data`, `loss`, `test_data`, `fit`, `statistics` and the metrics may have a further parameter named
    `context`, in which they get the `Context`: site, round, version, seed, deadline, options and settings.

    Raises:
        ValueError: a field is of a wrong type; the message lists all faults.
    """

    model: "Callable[..., torch.nn.Module]"
    """() -> the model with its initial weights; `outputs = model(inputs)`."""

    data: Callable[..., Any]
    """(site, split) -> map-style data set of (inputs, targets), split being "train" or "test"; None if the site has no
    such split."""

    loss: "Callable[..., torch.Tensor]"
    """(outputs, targets) -> mean loss over the batch: over its examples, or over other units (tokens, weights)."""

    sites: Sequence[str] = ()
    """The owners of the data, for a simulation and a centralized training; an agent has exactly one, named in its
    settings."""

    metrics: Mapping[str, Metric | Callable[[Any, Any], Sequence[Any]]] = field(default_factory=dict)
    """Metrics by name: (outputs, targets) -> (total, count) of the batch, or a `Metric`. The loss is always measured,
    as (sum of mean loss x units, units); a metric named "loss" replaces it."""

    local: Local = field(default_factory=Local)
    """The settings of the local training; a run's TOML may override them."""

    test_data: Callable[..., Any] | None = None
    """() -> the server's data set, on which the coordinator measures every version; None: it measures none."""

    fit: Callable[..., float] | None = None
    """(model, data, local, deadline) -> fraction of the work done, in (0, 1]: a custom training loop (Lightning,
    Hugging Face) in place of the built-in one."""

    units: Callable[[Any], Any] | str | None = None
    """targets -> the divisor of the mean loss of a batch, a number >= 0, not always whole: tokens that count, a sum of
    class weights. "sum": the loss is a sum over the examples. None: guessed, as the entries of whole-number targets
    that are not -100, else the examples."""

    collate: Callable[[list[Any]], Any] | None = None
    """rows -> the batch (inputs, targets), for rows that torch cannot stack: dicts, triples, texts of different
    lengths, which are padded here. None: rows are (inputs, targets) of equal shapes."""

    algorithm: Algorithm | None = None
    """The client's side of a custom federated algorithm: hooks of the built-in training loop, with tensors that are
    exchanged beside the model's and a state that stays at each client."""

    options: Mapping[str, Plain | None] = field(default_factory=dict)
    """Values of a run by name, with their defaults: a run's `[task]` table may set others of the same types, for all
    sites alike. They are `context.options`."""

    settings: Mapping[str, Plain | None] = field(default_factory=dict)
    """Values of a site by name, with their defaults, such as the path of its file: the `[task]` table of its
    `agent.toml` may set others of the same types, which never leave the site. They are `context.settings`."""

    statistics: Callable[..., Mapping[str, Any]] | None = None
    """(data, split) -> numbers of a site's data by name, given before a training (`atoll run statistics`): a number or
    an array, which is added over the sites, or a `Statistic` with another rule. None: counts, labels and moments of the
    features alone."""

    site_settings: Mapping[str, Mapping[str, Plain | None]] = field(default_factory=dict)
    """Settings of some sites by their names, over `settings`: for a simulation and a centralized training, whose files
    may set them in `[sites.NAME]`."""

    travels: str = "all"
    """Tensors that are exchanged: "all"; or "trained", only parameters with requires_grad and the buffers that training
    changes, such as an adapter's. Then all others must be the same at every site: their digest is checked."""

    base: Base | None = None
    """The files of the tensors that are not exchanged; None: every site builds them alike, from the seed of the run."""

    def __post_init__(self) -> None:
        faults = list(_faults(self))
        if faults:
            raise Refused(*(f"Task: {fault}" for fault in faults))
        object.__setattr__(self, "sites", tuple(self.sites))
        otherwise = context_of(self)
        for name in ("model", "data", "loss", "test_data", "fit", "statistics"):
            object.__setattr__(self, name, self._wrapped(name, otherwise))
        metrics = {name: _contextual_metric(metric, otherwise) for name, metric in self.metrics.items()}
        object.__setattr__(self, "metrics", metrics)

    def _wrapped(self, name: str, otherwise: Context) -> Any:
        """Return a function of the task with its context, and with the collation of its data."""
        function = getattr(self, name)
        if isinstance(function, CollatedData):  # `dataclasses.replace` gives what was wrapped before
            function = function.data
        function = contextual(function, otherwise)
        has_rows = name in ("data", "test_data") and function is not None and self.collate is not None
        return CollatedData(function, self.collate) if has_rows and self.collate is not None else function

    def with_options(self, values: Mapping[str, Any]) -> "Task":
        """Return a copy with a run's options; errors as in `given.with_values`."""
        changed = with_values(self.options, values, where="task", declared_by="Task(options=...)")
        return replace(self, options=changed) if values else self

    def with_settings(self, values: Mapping[str, Any]) -> "Task":
        """Return a copy with a site's settings; errors as in `given.with_values`."""
        changed = with_values(self.settings, values, where="task", declared_by="Task(settings=...)")
        return replace(self, settings=changed) if values else self

    def with_site_settings(self, tables: Mapping[str, Mapping[str, Any]]) -> "Task":
        """Return a copy with the settings of some sites; errors as in `given.with_tables`."""
        changed = with_tables(self.settings, self.site_settings, tables, self.sites)
        return replace(self, site_settings=changed) if tables else self


def _contextual_metric(metric: Any, otherwise: Context) -> Any:
    if isinstance(metric, Metric):
        return replace(metric, statistics=contextual(metric.statistics, otherwise))
    return contextual(metric, otherwise)


def _faults(task: Task) -> Iterator[str]:
    for name in ("model", "data", "loss"):
        if not callable(getattr(task, name)):
            yield f"{name} must be callable, got {getattr(task, name)!r}"
    for name in ("test_data", "fit", "collate", "statistics"):
        if getattr(task, name) is not None and not callable(getattr(task, name)):
            yield f"{name} must be callable or None, got {getattr(task, name)!r}"
    if task.fit is None and (names := _trainable_in(task.loss)):
        yield (
            f"loss has parameters ({', '.join(names)}), which no optimizer trains and no version has: make "
            "them parameters of the model, whose forward may return them; of a fixed network, requires_grad_(False)"
        )
    if not (task.units is None or task.units == "sum" or callable(task.units)):
        yield f'units must be a function of the targets, "sum" or None, got {task.units!r}'
    if not isinstance(task.local, Local):
        yield f"local must be a Local, got {task.local!r}"
    yield from travelling_faults(task.travels, task.base)
    yield from algorithm_faults(task.algorithm, has_fit=task.fit is not None)
    yield from _site_faults(task.sites)
    yield from _metric_faults(task.metrics)
    yield from value_faults("options", task.options)
    if not (wrong := value_faults("settings", task.settings)):
        wrong = _site_settings_faults(task.settings, task.site_settings, task.sites)
    yield from wrong


def _trainable_in(loss: Any) -> list[str]:
    """Return the names of the parameters with requires_grad of the module that a loss is, or whose method it is."""
    for attribute in ("function", "func", "__self__"):
        loss = getattr(loss, attribute, loss)
    named = getattr(loss, "named_parameters", None)
    return [name for name, parameter in named() if parameter.requires_grad] if callable(named) else []


def _site_faults(sites: object) -> Iterator[str]:
    if isinstance(sites, str) or not isinstance(sites, Sequence):
        yield f"sites must be a list of names, got {sites!r}"
        return
    yield from (f"sites: {site!r} is not a name" for site in sites if not (isinstance(site, str) and site))
    if len(set(map(repr, sites))) < len(sites):
        yield f"sites: names must differ, got {list(sites)!r}"


def _site_settings_faults(settings: Mapping[str, Any], tables: object, sites: Any) -> list[str]:
    if not isinstance(tables, Mapping):
        return [f"site_settings must be a mapping from site to its settings, got {tables!r}"]
    if wrong := [
        f"site_settings: {site!r} must be the name of a site with a mapping of its settings, got {values!r}"
        for site, values in tables.items()
        if not (isinstance(site, str) and isinstance(values, Mapping))
    ]:
        return wrong
    try:
        known = [site for site in sites if isinstance(site, str)] if isinstance(sites, Sequence) else []
        with_tables(settings, {}, tables, known)
    except OverridesRefused as error:
        return [f"site_settings: {fault}" for fault in error.faults]
    return []


def _metric_faults(metrics: object) -> Iterator[str]:
    if not isinstance(metrics, Mapping):
        yield f"metrics must be a mapping from name to function, got {metrics!r}"
        return
    if len(metrics) > METRICS_MAX:
        yield f"metrics: got {len(metrics)}; allowed: at most {METRICS_MAX}, as a site may send no more sums"
    for name, metric in metrics.items():
        if not isinstance(name, str) or not (isinstance(metric, Metric) or callable(metric)):
            yield f"metrics: {name!r} must be a name with a function or a Metric, got {metric!r}"
        elif not is_name(name):
            yield name_fault(name)


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
        with loading():
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

    `path/to/digits.py:task` becomes `digits:task`; `package.module:task` stays; an app has the name that
    its framework gives it, such as `flower:PUBLISHER/NAME`.

    Raises:
        TaskNotFound: the text has not the form of a reference.
    """
    if is_app(reference):
        return framework().name_of(reference)
    try:
        place, attribute = split(reference)
    except ReferenceNotFound as error:
        raise TaskNotFound(str(error)) from error
    return f"{Path(place).stem if is_file(place) else place}:{attribute}"


def is_task(value: object) -> TypeGuard[Task | ArrayTask]:
    """Return whether a value is a `Task`, or an object that serves as an `ArrayTask`."""
    return isinstance(value, Task) or (isinstance(value, ArrayTask) and not isinstance(value, type))
