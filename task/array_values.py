"""An `ArrayTask` with the values that a run and a site give to it."""

from collections.abc import Callable, Mapping
from typing import Any

from atoll.ground.faults import Refused
from atoll.task.array_task import ArrayTask, Instructions, Trained
from atoll.task.arrays import Arrays
from atoll.task.context import context_of, contextual
from atoll.task.given import value_faults, with_tables, with_values
from atoll.task.overrides import check_all
from atoll.task.task import Task


class Valued:
    """An `ArrayTask` with options and settings; everything else is delegated to the task.

    Args:
        task: the task; its `options` and `settings`, if it has any, are the defaults.
        options: the values of the run.
        settings: the values of the site.
        site_settings: the values of several sites by name, over these.

    Raises:
        OverridesRefused: unknown names or wrong types; the message lists all faults.
        ValueError: the task's `options` or `settings` are no plain values by name.
    """

    def __init__(
        self,
        task: ArrayTask,
        options: Mapping[str, Any] | None = None,
        settings: Mapping[str, Any] | None = None,
        site_settings: Mapping[str, Mapping[str, Any]] | None = None,
    ) -> None:
        self.task = task
        defaults = {name: getattr(task, name, {}) for name in ("options", "settings")}
        if faults := [fault for name, values in defaults.items() for fault in value_faults(name, values)]:
            raise Refused(*faults)
        self.options, self.settings = dict(defaults["options"]), dict(defaults["settings"])
        own = getattr(task, "site_settings", {})
        self.site_settings = {site: dict(values) for site, values in own.items()}
        check_all(
            lambda: self.options.update(with_values(self.options, options or {}, where="task", declared_by="options")),
            lambda: self.settings.update(
                with_values(self.settings, settings or {}, where="task", declared_by="settings")
            ),
            lambda: self.site_settings.update(
                with_tables(self.settings, own, site_settings or {}, getattr(task, "sites", ()))
            ),
        )

    def __reduce__(self) -> tuple[Any, ...]:
        return type(self), (self.task, self.options, self.settings, self.site_settings)

    def __getattr__(self, name: str) -> Any:
        found = getattr(self.task, name)
        return contextual(found, context_of(self)) if name in ("evaluate", "num_examples", "statistics") else found

    def initial(self, seed: int) -> Arrays:
        """Return the task's initial arrays; see `ArrayTask.initial`."""
        initial: Callable[[int], Arrays] = contextual(self.task.initial, context_of(self))
        return initial(seed)

    def train(self, parameters: Arrays, instructions: Instructions) -> Trained:
        """Train as the task does; see `ArrayTask.train`."""
        return self.task.train(parameters, instructions)


def tuned(
    task: Task | ArrayTask,
    options: Mapping[str, Any] | None = None,
    site_settings: Mapping[str, Mapping[str, Any]] | None = None,
) -> Task | ArrayTask:
    """Return a task of either kind with values of a run, and of several sites; errors as in `given.with_values`."""
    if isinstance(task, Task) or hasattr(task, "with_options"):  # a Flower app has these methods, too
        own: Any = task
        check_all(lambda: own.with_options(options or {}), lambda: own.with_site_settings(site_settings or {}))
        tuned_task: Task | ArrayTask = own.with_options(options or {}).with_site_settings(site_settings or {})
        return tuned_task
    return Valued(task, options, site_settings=site_settings)


def valued(
    task: ArrayTask, options: Mapping[str, Any] | None = None, settings: Mapping[str, Any] | None = None
) -> ArrayTask:
    """Return a task with values of a run and of a site; errors as in `Valued`."""
    if isinstance(task, Valued):
        both = {**task.options, **(options or {})}, {**task.settings, **(settings or {})}
        return Valued(task.task, *both, site_settings=task.site_settings)
    return Valued(task, options, settings)
