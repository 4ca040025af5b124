"""The loading of a run's TOML or a task that a command names, with all mistakes reported at once."""

import json
import os
import tomllib
from collections.abc import Callable, Container, Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar, overload

from atoll.flower.app import FlowerApp
from atoll.ground.folders import no_file
from atoll.ground.printable import count_of
from atoll.ground.process.loading import loading
from atoll.ground.text_files import text_of
from atoll.operations.faults import CommandError
from atoll.operations.flower_plan import app_of, run_of_app
from atoll.operations.place import STATE
from atoll.operations.reporter import note, waiting_for
from atoll.plugins.kind import AS_RECORDED
from atoll.plugins.reference import is_file
from atoll.protocol.secrets import without_password
from atoll.protocol.settings import ConfigError, load, load_text, quoted, value_of
from atoll.protocol.signals import Stopped
from atoll.server.config.model import run_and_version
from atoll.server.config.process import HostFile
from atoll.server.config.run import RunFile
from atoll.task.apps import is_app, with_app

if TYPE_CHECKING:
    from atoll.task.task import ArrayTask, Task


File = TypeVar("File", bound=RunFile)

OF_A_SIMULATION = ("population.kind", "devices.model")
"""The settings of a simulation that may name code, in a module or a file."""


def is_toml(what: str) -> bool:
    """Return whether the argument names a TOML file rather than a task."""
    return what.endswith(".toml")


@overload
def load_run(what: str, overrides: Sequence[str] = (), *, is_elsewhere: Callable[[RunFile], bool] = ...) -> RunFile: ...
@overload
def load_run(what: str, overrides: Sequence[str] = (), *, kind: type[File], nodes: int | None = ...) -> File: ...
def load_run(
    what: str,
    overrides: Sequence[str] = (),
    *,
    kind: type[RunFile] = RunFile,
    is_elsewhere: Callable[[RunFile], bool] = lambda file: False,
    nodes: int | None = None,
) -> RunFile:
    """Load the settings of a run.

    Args:
        what: a run's TOML, or a task to run with the defaults.
        overrides: `key=value`; a path in an override is relative to the current directory, one in a TOML to its folder.
        kind: the model of the TOML, with the tables that it may have.
        is_elsewhere: whether the run is for a coordinator on another machine, which has the files that it names.
        nodes: the number of clients of a Flower app; None: the number of the project's federations.

    Raises:
        ConfigError: all mistakes in the settings.
    """
    folder, name = (Path(what).parent, what) if is_toml(what) else (Path(), "")
    set_here = {override.partition("=")[0].strip() for override in overrides}
    try:
        file = _loaded(what, overrides, kind, nodes=nodes)
    except ConfigError:
        of_elsewhere = _loaded_for_elsewhere(what, overrides, kind)
        if of_elsewhere is None or not is_elsewhere(of_elsewhere):
            raise
        file = of_elsewhere
    if is_elsewhere(file):
        return _with_paths_of_elsewhere(file, set_here, name)
    return _with_absolute_paths(file, folder, set_here, name)


def _loaded(
    what: str,
    overrides: Sequence[str],
    kind: type[File],
    *,
    context: Mapping[str, Any] | None = None,
    nodes: int | None = None,
) -> File:
    if is_toml(what):
        file = load(kind, Path(what), overrides, context=context)
        if is_app(file.task) and not file.program.main and not file.program.native:
            way_out = "set program.main to it, or program.native = true for rounds by the settings of this file"
            raise ConfigError([f"task = {file.task!r}: a Flower app runs hosted: {way_out}"])
        return file
    if is_app(reference := with_app(what)):
        return load_app(reference, overrides, kind, nodes=nodes)[0]
    return load_text(kind, f"task = {quoted(what)}", overrides, name="", context=context)


def load_app(
    reference: str, overrides: Sequence[str], kind: type[File], *, nodes: int | None = None
) -> "tuple[File, FlowerApp]":
    """Load the settings of a run of a Flower app: a run of messages or, with `program.native`, one of its strategy.

    Args:
        reference: the reference of the app.
        overrides: `key=value`; overrides of the table `task` change the run config.
        kind: the model of the settings.
        nodes: the number of clients; None: the number of the project's federations.

    Raises:
        ConfigError: mistakes in the overrides.
        CommandError: the app's description or a value of its run config is wrong, or its code raises.
    """
    from atoll.flower.task import NODES

    is_simulated = "simulation" in kind.model_fields
    app = app_of(reference)
    number = nodes or app.num_supernodes or (NODES if is_simulated else None)
    run = run_of_app(
        reference, options_among(reference, overrides), nodes=number, is_native=_is_native(reference, overrides)
    )
    file = load_text(kind, run, overrides, name="")
    is_sized = number is not None or any(override.lstrip().startswith("round.cohort_size") for override in overrides)
    if isinstance(file, RunFile) and not file.program.main and not is_sized:
        trained = count_of(file.round.cohort_size, "client")
        of = "counted from the strategy's min_available_nodes"
        note(f"{app.task}: a round trains {trained}, {of}; in a larger fleet: --set round.cohort_size=N")
    return file, app


def _is_native(reference: str, overrides: Sequence[str]) -> bool:
    """Return whether overrides ask for the native run of a Flower app."""
    of_program = [override.lstrip() for override in overrides if override.lstrip().startswith("program.native")]
    return load_text(RunFile, f"task = {quoted(reference)}", of_program, name="").program.native


def options_among(reference: str, overrides: Sequence[str]) -> Mapping[str, Any]:
    """Return the values of an app's run config among overrides; the others are read with the run's settings."""
    of_task = [override for override in overrides if override.lstrip().startswith("task.")]
    return load_text(RunFile, f"task = {quoted(reference)}", of_task, name="").options


def _loaded_for_elsewhere(what: str, overrides: Sequence[str], kind: type[File]) -> File | None:
    """Return the settings with names of packages that another machine may have; None: they have other mistakes."""
    try:
        return _loaded(what, overrides, kind, context=AS_RECORDED)
    except ConfigError:
        return None


def load_host(what: str | None, overrides: Sequence[str] = ()) -> HostFile | RunFile:
    """Load the TOML of `atoll coordinator`: a run's settings, or the coordinator's table alone."""
    if what is None:
        return load(HostFile, None, overrides)
    if is_toml(what) and _has_only_the_host(Path(what)):
        return load(HostFile, Path(what), overrides)
    return load_run(what, overrides)


@contextmanager
def all_faults(found: Sequence[str]) -> Iterator[None]:
    """Add faults that are found already to those that the block, which reads settings, raises.

    Raises:
        ConfigError: the given faults, and those that the block finds.
    """
    try:
        yield
    except ConfigError as error:
        raise ConfigError([*found, *error.faults]) from error
    if found:
        raise ConfigError(found)


def note_unused_settings(file: RunFile, what: str, *, used: Container[str] = (), why: str) -> None:
    """Note the settings of a TOML's coordinator table that have no effect in this command.

    Args:
        file: the settings of the run.
        what: the file, for the note.
        used: the fields of the table that the command uses.
        why: the end of the sentence.
    """
    given = {name: value for name, value in file.coordinator if name in file.coordinator.model_fields_set}
    note_unused({name: value for name, value in given.items() if name not in used}, what, why=why)
    if file.notify.model_fields_set:  # its values may be secret
        note(f"{what}: not used here: [notify]; {why}")


def note_unused(given: Mapping[str, object], what: str, *, why: str) -> None:
    """Note settings of the coordinator's table, by their names in it; nothing where there is none."""
    settings = [
        f"{name} = {json.dumps(without_password(str(value)) if isinstance(value, str | Path) else value)}"
        for name, value in given.items()
    ]
    if settings:
        note(f"{what}: not used here, of [coordinator]: {', '.join(settings)}; {why}")


def state_of(file: RunFile, what: str, state: Path | None) -> Path:
    """Return the state directory: the option's, else the one in the run's file, else the default."""
    return state or (file.coordinator.state if is_toml(what) else STATE)


def overriding(overrides: Sequence[str], **options: object) -> list[str]:
    """Append the options that have a value to the overrides.

    The option `coordinator__state` is the setting coordinator.state.

    Raises:
        CommandError: overrides contradict options; the error lists all of them.
    """
    given = {name.replace("__", "."): value for name, value in options.items() if value is not None}
    plain = {name: json.dumps(value) if isinstance(value, int) else quoted(str(value)) for name, value in given.items()}
    others = {name.strip(): value.strip() for name, _, value in (text.partition("=") for text in overrides)}
    if faults := [
        f"{name}: {_both(name, value, others[name])}: give one of them, or equal ones"
        for name, value in plain.items()
        if name in others and not _are_equal(name, others[name], value)
    ]:
        raise CommandError(*faults)
    return [*overrides, *(f"{name}={value}" for name, value in plain.items())]


def _both(name: str, of_option: str, of_set: str) -> str:
    """Return both values of a setting for a message, but not those of a join code or a password."""
    if name == "join":
        return "two codes, by its option and by --set"
    return without_password(f"got {of_option} by its option and {of_set} by --set")


def _are_equal(name: str, text: str, other: str) -> bool:
    try:
        return bool(value_of(name, text) == value_of(name, other))
    except ValueError:
        return True  # reading the settings reports that it is no value


def _has_only_the_host(path: Path) -> bool:
    try:
        document = tomllib.loads(text_of(path.read_bytes(), path))
    except (OSError, ValueError, RecursionError):
        return False  # `load` reports it
    return bool(document) and document.keys() <= HostFile.model_fields.keys()


def _references(file: RunFile) -> dict[str, str]:
    """Return the settings that name code, in a module or a file."""
    named = {
        "task": file.task,
        "cohort.sampler": file.cohort.sampler,
        "aggregation.rule": file.aggregation.rule,
        "optimizer.name": file.optimizer.name,
        **({"program.main": file.program.main} if file.program.main else {}),
    }
    return named | {key: reference for key in OF_A_SIMULATION if (reference := _value_at(file, key)) is not None}


def _value_at(file: RunFile, key: str) -> str | None:
    """Return a setting of a simulation; None: the file is for a deployed run, or does not set it."""
    table, _, name = key.partition(".")
    value: str | None = getattr(getattr(file, table, None), name, None)
    return value


def _source(key: str, set_here: Container[str], name: str) -> str:
    """Return the origin of a setting, as the beginning of a message."""
    return "--set: " if key in set_here else f"{name}: " if name else ""


def _with_paths_of_elsewhere(file: RunFile, set_here: Container[str], name: str) -> RunFile:
    """Check that a run's files have absolute paths, and return the run; the coordinator looks for the files."""
    places = {key: reference.rpartition(":")[0] for key, reference in _references(file).items()}
    if (start := file.model.start) and run_and_version(start) is None:
        places["model.start"] = start if "/" in start else f"./{start}"
    if faults := [
        f"{_source(key, set_here, name)}{key}: {place} is a relative path, and the coordinator is on another machine: "
        "name the absolute path of the file there"
        for key, place in places.items()
        if is_file(place) and not os.path.isabs(place)
    ]:
        raise ConfigError(faults)
    return file


def _with_absolute_paths(file: File, folder: Path, set_here: Container[str], name: str) -> File:
    """Make the paths of a run's settings absolute, and return the run; a missing file is a mistake."""
    faults, absolute = [], {}
    for key, reference in _references(file).items():
        absolute[key] = _absolute(reference, Path() if key in set_here else folder)
        if (fault := missing_file(absolute[key])) is not None:
            faults.append(f"{_source(key, set_here, name)}{key}: {fault}")
    model = file.model
    if model.start and run_and_version(model.start) is None:
        path = os.path.abspath((Path() if "model.start" in set_here else folder) / model.start)
        model = model.model_copy(update={"start": path})
        if not os.path.isfile(path):
            faults.append(f"{_source('model.start', set_here, name)}model.start: {no_file(path)}")
    if faults:
        raise ConfigError(faults)
    cohort = file.cohort.model_copy(update={"sampler": absolute["cohort.sampler"]})
    aggregation = file.aggregation.model_copy(update={"rule": absolute["aggregation.rule"]})
    optimizer = file.optimizer.model_copy(update={"name": absolute["optimizer.name"]})
    changes = {
        "task": absolute["task"],
        "cohort": cohort,
        "aggregation": aggregation,
        "optimizer": optimizer,
        "model": model,
        "program": file.program.model_copy(update={"main": absolute.get("program.main", "")}),
    }
    for key in absolute.keys() & OF_A_SIMULATION:
        table, _, name = key.partition(".")
        changes[table] = getattr(file, table).model_copy(update={name: absolute[key]})
    file = file.model_copy(update=changes)
    return _with_absolute_traces(file, folder, set_here)


def _with_absolute_traces(file: File, folder: Path, set_here: Container[str]) -> File:
    """Make the paths to a simulation's device traces absolute, and return the run; their reader checks the files."""
    devices = getattr(file, "devices", None)
    paths = {name: getattr(devices, name, None) for name in ("trace", "awake_trace")}
    absolute = {
        name: Path(os.path.abspath((Path() if f"devices.{name}" in set_here else folder) / path))
        for name, path in paths.items()
        if path is not None
    }
    return file.model_copy(update={"devices": devices.model_copy(update=absolute)}) if devices and absolute else file


def check_folder(key: str, path: Path) -> None:
    """Refuse a state directory that is a file.

    Raises:
        CommandError: the path exists, and is no directory.
    """
    if os.path.lexists(path) and not path.is_dir():
        raise CommandError(f"{key}: {path} is not a directory; choose another path for the state")


def missing_file(reference: str) -> str | None:
    """Return the mistake that a reference names a missing file; None: it names a module, or the file exists."""
    place = reference.rpartition(":")[0]
    return no_file(place) if is_file(place) and not os.path.isfile(place) else None


def load_user_task(reference: str, *, nodes: int | None = None) -> "Task | ArrayTask":
    """Load a task in this process, so that its mistakes are reported before anything starts.

    Args:
        reference: the reference of the task.
        nodes: the number of clients of a Flower app; None: the number of the project's federations, or 10.

    Raises:
        CommandError: the task's code raised an error, or the reference names no task.
    """
    try:
        with waiting_for(f"the task {reference}", "its file and its libraries are imported"), loading():
            from atoll.task.errors import TaskNotFound
            from atoll.task.task import load_task

            if is_app(reference):
                from atoll.flower.task import NODES, FlowerTask

                app = app_of(reference)
                return FlowerTask(app, nodes or app.num_supernodes or NODES)
            return load_task(reference)
    except TaskNotFound as error:
        raise CommandError(str(error)) from error
    except Stopped:
        raise
    except (Exception, SystemExit) as error:  # any: the user's code runs here
        raise CommandError(f"{reference}: cannot be loaded: {type(error).__name__}: {error}") from error


def _absolute(reference: str, folder: Path) -> str:
    place, _, attribute = reference.rpartition(":")
    return f"{os.path.abspath(folder / place)}:{attribute}" if is_file(place) else reference
