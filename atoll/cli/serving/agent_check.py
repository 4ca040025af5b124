"""The check of an agent's setup, before it starts: its state directory, join code, tasks and their settings."""

from collections.abc import Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, Any

from atoll.cli.printing import note

if TYPE_CHECKING:
    from atoll.client.config import AgentConfig


def faults_at_the_site(settings: "AgentConfig", references: Sequence[str]) -> list[str]:
    """List the faults of an agent's setup, a sentence each; note a site that no task knows by name.

    Args:
        settings: the settings of the agent.
        references: the agent's tasks, which are loaded in this process; Flower apps, and tasks with an interpreter of
            the site's, in a worker.
    """
    from atoll.operations.faults import CommandError
    from atoll.operations.load import check_folder, load_user_task
    from atoll.operations.worker_check import check_in_worker
    from atoll.protocol.settings import ConfigError
    from atoll.task.apps import is_app

    faults = _faults_of_join_code(settings.join)
    try:
        check_folder("state", settings.state)
    except ConfigError as error:
        faults += error.faults
    tasks: dict[str, Any] = {}
    for reference in references:
        try:
            if settings.python is not None or is_app(reference):
                given: dict[str, Any] = {"settings": settings.task, "python": settings.python}
                check_in_worker(reference, site=settings.site, is_tried=not is_app(reference), **given)
            else:
                tasks[reference] = load_user_task(reference)
        except CommandError as error:
            faults += error.faults
    if len(tasks) == len(references):
        of_settings = _faults_of_settings(settings.task, tasks)
        _note_unknown_site(settings.site, tasks)
        faults += of_settings or [*_faults_of_batches(settings, tasks)]
    return faults


def _faults_of_batches(settings: "AgentConfig", tasks: Mapping[str, Any]) -> Iterator[str]:
    """Yield why tasks cannot be used with this site's data, as the agent finds it when it starts."""
    from atoll.client.work.data_away import said_of_data
    from atoll.ground.printable import conclusion
    from atoll.training.worker.benches import bench_of
    from atoll.training.worker.operations import detail_of

    request = {"site": settings.site, "settings": settings.task, "device": settings.device}
    for reference, task in tasks.items():
        try:
            bench = bench_of(task, request)
            if bench.num_examples() is not None:
                bench.try_out()
        except Exception as error:  # any: the task's code runs here
            fault = conclusion(detail_of(error))
            away = said_of_data(fault, reference)
            yield f"{reference}: {fault}" + (f": {away}" if away else "")


def _faults_of_join_code(text: str) -> list[str]:
    from atoll.protocol.identity.join_code import JoinCode, JoinCodeError

    try:
        if text:
            JoinCode.parse(text)
    except JoinCodeError as error:
        return [f"join: {error}; `atoll client invite NAME` prints a new one"]
    return []


def _faults_of_settings(given: Mapping[str, Any], tasks: Mapping[str, Any]) -> list[str]:
    """List the faults of the site's values: names that no task declares, and values of another type."""
    from atoll.task.given import with_values
    from atoll.task.overrides import OverridesRefused

    declared = [getattr(task, "settings", {}) for task in tasks.values()]
    every = {name: value for settings in declared for name, value in settings.items()}
    unknown = {name: value for name, value in given.items() if name not in every}
    faults: list[str] = []
    for settings in (*declared, every):
        known = {name: value for name, value in given.items() if name in settings}
        mine = known if settings is not every else unknown
        try:
            with_values(settings, mine, where="task", declared_by=f"the settings of {', '.join(tasks)}")
        except OverridesRefused as error:
            faults += error.faults
    return list(dict.fromkeys(faults))


def _note_unknown_site(site: str, tasks: Mapping[str, Any]) -> None:
    """Note the tasks whose list of sites, which simulations and trainings use, lacks this one."""
    for reference, task in tasks.items():
        names = tuple(getattr(task, "sites", ()))
        if names and site not in names:
            shown = ", ".join(names[:8]) + (", ..." if len(names) > 8 else "")
            note(f"site {site} is not among the sites of {reference} ({shown}): its `data` must know this site")
