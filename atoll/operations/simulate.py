"""Simulate a federation on this machine: its settings with its task, and the run in its folder."""

import tomllib
from collections.abc import Callable, Sequence
from pathlib import Path

from atoll.ground.text_files import text_of
from atoll.operations.faults import CommandError
from atoll.operations.load import all_faults, load_run, load_user_task, note_unused_settings, overriding, state_of
from atoll.operations.reporter import interruptible, note
from atoll.operations.requests import SimulateRequest
from atoll.operations.starts import file_of_start
from atoll.operations.task_failures import task_failures_in_one_line
from atoll.server.config.model import run_and_version
from atoll.simulations.federation.config import OF_A_COORDINATOR, SimulationFile
from atoll.simulations.federation.report import Json
from atoll.simulations.federation.run import opened
from atoll.simulations.federation.setting import setting_of
from atoll.task.apps import is_app, with_app
from atoll.task.array_task import ArrayTask
from atoll.task.task import Task

NO_COORDINATOR = "a simulation has no coordinator's process"


def with_task(
    request: SimulateRequest, task: Task | ArrayTask | None = None
) -> tuple[SimulationFile, Task | ArrayTask]:
    """Load the settings of a simulated run and its task, and log the settings that a simulation does not use.

    Args:
        request: the request.
        task: the task that it names; None: it is loaded.

    Raises:
        ConfigError: all mistakes in the settings.
        CommandError: the task cannot be loaded.
    """
    file = load_simulation(request)
    note_unused(file, request.what or "")
    return file, load_user_task(file.task, nodes=request.clients) if task is None else task


def check_simulation(file: SimulationFile, task: Task | ArrayTask) -> Sequence[str]:
    """Build and check all parts that the settings name; return the notes on the population.

    Raises:
        ConfigError: all faults of the settings and the task.
        CommandError: the task's code has failed.
    """
    with task_failures_in_one_line():
        if file.run.is_of_messages:
            from atoll.simulations.messages.run import setting_of as setting_of_messages

            setting_of_messages(file, task)
            return ()
        setting = setting_of(file, task)
        file.aggregation.build()
    return setting.notes


def run_simulation(
    file: SimulationFile,
    task: Task | ArrayTask,
    folder: Path,
    report: Callable[[Json], None],
    *,
    is_fresh: bool = False,
) -> Json:
    """Run or resume a simulation in its folder, and return its result.

    Args:
        file: the settings.
        task: the task that they name.
        folder: the folder of the run.
        report: a callback for each round's line.
        is_fresh: refuse a folder that has a run.

    Raises:
        ConfigError: all faults of the settings, the task or the folder, before anything runs.
        CommandError: the task's code, or a worker process, has failed.
    """
    with (
        task_failures_in_one_line(),
        opened(file, task, folder, on_round=report, is_fresh=is_fresh, tell=note) as federation,
        interruptible(federation.interrupt),
    ):
        return federation.run()


def run_messages(file: SimulationFile, task: Task | ArrayTask, folder: Path, *, is_fresh: bool = False) -> Json:
    """Simulate a run of messages in its folder, note each exchange, and return the result.

    Args:
        file: the settings.
        task: the task that they name.
        folder: the folder of the run.
        is_fresh: refuse a folder that has an interrupted run.

    Raises:
        ConfigError: all faults of the settings, the task or the folder, before anything runs.
        CommandError: a worker process has failed.
    """
    from atoll.simulations.messages.run import opened as opened_messages

    with (
        task_failures_in_one_line(),
        opened_messages(
            file, task, folder, on_exchange=lambda line: note(line["sentence"]), is_fresh=is_fresh, tell=note
        ) as federation,
        interruptible(federation.interrupt),
    ):
        return federation.run()


def load_simulation(request: SimulateRequest) -> SimulationFile:
    """Load the settings of a simulated run.

    Raises:
        ConfigError: all mistakes in the settings.
        CommandError: the request names no run, or a setting twice.
    """
    if (what := request.what) is None:
        raise CommandError("name a task or a run's TOML")
    overrides = with_drop_empty(request.overrides, request.drop_empty, seed=request.seed)
    kind = {"population__kind": "iid"} if request.clients is not None and not _sets_kind(what, overrides) else {}
    dealt = {} if is_app(with_app(what)) else {"population__clients": request.clients, **kind}
    short = overriding(overrides, rounds=request.rounds, simulation__engine=request.engine, **dealt)
    with all_faults(_of_a_coordinator_alone(overrides)):
        file = load_run(what, short, kind=SimulationFile, nodes=request.clients)
    if run_and_version(file.model.start) is None:
        return file
    start = file_of_start(file.model.start, setting="model.start", state=state_of(file, what, None))
    host = file.coordinator.model_copy()
    host.model_fields_set.discard("state")  # it is used, and not noted as unused
    return file.model_copy(update={"model": file.model.model_copy(update={"start": start}), "coordinator": host})


def with_drop_empty(overrides: Sequence[str], drop_empty: bool, **options: object) -> list[str]:
    """Add --drop-empty and the other options to the overrides, and return them; errors as in `overriding`."""
    return overriding(overrides, population__drop_empty=drop_empty or None, **options)


def _of_a_coordinator_alone(overrides: list[str]) -> list[str]:
    """List the overrides that only a coordinator's process would use, as faults."""
    keys = [override.partition("=")[0].strip() for override in overrides]
    unused = [key for key in keys if key.startswith(("coordinator.", "notify.")) and key not in OF_A_COORDINATOR]
    return [f"{key}: {NO_COORDINATOR}: leave it out" for key in unused]


def note_unused(file: SimulationFile, what: str) -> None:
    """Log the settings of a TOML that are for a coordinator's process, which a simulated run does not have."""
    used = [key.removeprefix("coordinator.") for key in OF_A_COORDINATOR]
    note_unused_settings(file, what, used=used, why=f"{NO_COORDINATOR}; `model.keep_versions` is a setting of the run")


def _sets_kind(what: str, overrides: list[str]) -> bool:
    """Return whether the TOML or an override sets population.kind."""
    if any(override.partition("=")[0].strip() == "population.kind" for override in overrides):
        return True
    if not what.endswith(".toml"):
        return False
    try:
        return "kind" in tomllib.loads(text_of(Path(what).read_bytes(), what)).get("population", {})
    except (OSError, ValueError, RecursionError, AttributeError):
        return False  # loading the file reports it
