"""What the operator names on the command line: a run's TOML or a task, with everything that is wrong said at once."""

import json
import os
import tomllib
from collections.abc import Callable, Container, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, TypeVar, overload

from atoll.cli.faults import CommandError
from atoll.cli.options import STATE
from atoll.protocol.settings import ConfigError, load, load_text
from atoll.server.config.process import HostFile
from atoll.server.config.run import RunFile

if TYPE_CHECKING:
    from atoll.parallel.task.task import ArrayTask, Task


File = TypeVar("File", bound=RunFile)

_OF_THE_HOST = (
    "belongs to the coordinator, which runs already: give it to `atoll coordinator`; --state says which one is meant"
)


def is_toml(what: str) -> bool:
    """Whether the argument names a TOML file rather than a task."""
    return what.endswith(".toml")


@overload
def load_run(what: str, overrides: Sequence[str] = (), *, is_elsewhere: Callable[[RunFile], bool] = ...) -> RunFile: ...
@overload
def load_run(what: str, overrides: Sequence[str] = (), *, kind: type[File]) -> File: ...
def load_run(
    what: str,
    overrides: Sequence[str] = (),
    *,
    kind: type[RunFile] = RunFile,
    is_elsewhere: Callable[[RunFile], bool] = lambda file: False,
) -> RunFile:
    """The settings of a run.

    Args:
        what: a run's TOML, or a task: then the run has the defaults.
        overrides: `key=value`; a path in one is relative to the current directory, one in a TOML to its folder.
        kind: which tables the TOML may have.
        is_elsewhere: whether the run is for a coordinator on another machine, where the files lie that it names.

    Raises:
        ConfigError: with everything that is wrong.
    """
    if is_toml(what):
        file, folder, name = load(kind, Path(what), overrides), Path(what).parent, what
    else:
        file, folder, name = load_text(kind, f"task = {json.dumps(what)}", overrides, name=""), Path(), ""
    set_here = {override.partition("=")[0].strip() for override in overrides}
    if is_elsewhere(file):
        return _with_paths_of_elsewhere(file, set_here, name)
    return _with_absolute_paths(file, folder, set_here, name)


def load_host(what: str | None, overrides: Sequence[str] = ()) -> HostFile | RunFile:
    """What `atoll coordinator` was given: a run, or nothing but the coordinator's own table."""
    if what is None:
        return load(HostFile, None, overrides)
    if is_toml(what) and _has_only_the_host(Path(what)):
        return load(HostFile, Path(what), overrides)
    return load_run(what, overrides)


def refuse_settings_of_the_host(overrides: Sequence[str]) -> None:
    """What starts a run on a coordinator that is there already cannot give it other settings.

    Raises:
        ConfigError: overrides of the coordinator's table; a TOML may have it, for it serves both commands.
    """
    keys = [override.partition("=")[0].strip() for override in overrides]
    if faults := [f"--set: {key}: {_OF_THE_HOST}" for key in keys if key.partition(".")[0].strip() == "coordinator"]:
        raise ConfigError(faults)


def state_of(file: RunFile, what: str, state: Path | None) -> Path:
    """The state directory that a command means: the option, or what the run's file says, or the default."""
    return state or (file.coordinator.state if is_toml(what) else STATE)


def overriding(overrides: Sequence[str], **options: object) -> list[str]:
    """The options that were given, as overrides that win; `coordinator__state=x` stands for coordinator.state."""
    given = {name.replace("__", "."): value for name, value in options.items() if value is not None}
    plain = {name: value if isinstance(value, int) else str(value) for name, value in given.items()}
    return [*overrides, *(f"{name}={json.dumps(value)}" for name, value in plain.items())]


def _has_only_the_host(path: Path) -> bool:
    try:
        document = tomllib.loads(path.read_text("utf-8"))
    except (OSError, ValueError, RecursionError):
        return False  # `load` will say what is wrong
    return document.keys() == {"coordinator"}


def _references(file: RunFile) -> dict[str, str]:
    """What names code: modules, or files."""
    return {"task": file.task, "cohort.sampler": file.cohort.sampler}


def _source(key: str, set_here: Container[str], name: str) -> str:
    """Where a setting comes from, for whoever is told about it."""
    return "--set: " if key in set_here else f"{name}: " if name else ""


def _with_paths_of_elsewhere(file: RunFile, set_here: Container[str], name: str) -> RunFile:
    """The same: whether the files are on the coordinator's machine, it says itself; no folder here means anything."""
    places = {key: reference.rpartition(":")[0] for key, reference in _references(file).items()}
    if faults := [
        f"{_source(key, set_here, name)}{key}: {place} is relative, and the coordinator is on another machine: name "
        "the file as it lies there, from / on"
        for key, place in places.items()
        if _is_file(place) and not os.path.isabs(place)
    ]:
        raise ConfigError(faults)
    return file


def _with_absolute_paths(file: File, folder: Path, set_here: Container[str], name: str) -> File:
    """The same with paths that hold wherever the coordinator runs; a file that is not there is a fault."""
    faults, absolute = [], {}
    for key, reference in _references(file).items():
        absolute[key] = _absolute(reference, Path() if key in set_here else folder)
        if (fault := missing_file(absolute[key])) is not None:
            faults.append(f"{_source(key, set_here, name)}{key}: {fault}")
    if faults:
        raise ConfigError(faults)
    cohort = file.cohort.model_copy(update={"sampler": absolute["cohort.sampler"]})
    file = file.model_copy(update={"task": absolute["task"], "cohort": cohort})
    return _with_absolute_traces(file, folder, set_here)


def _with_absolute_traces(file: File, folder: Path, set_here: Container[str]) -> File:
    """The same for the traces of a simulated run's devices; what reads them says what is wrong with them."""
    devices = getattr(file, "devices", None)
    paths = {name: getattr(devices, name, None) for name in ("trace", "awake_trace")}
    absolute = {
        name: Path(os.path.abspath((Path() if f"devices.{name}" in set_here else folder) / path))
        for name, path in paths.items()
        if path is not None
    }
    return file.model_copy(update={"devices": devices.model_copy(update=absolute)}) if devices and absolute else file


def missing_file(reference: str) -> str | None:
    """That a reference names a file that is not there; None when it does not."""
    place = reference.rpartition(":")[0]
    return f"there is no file {place}" if _is_file(place) and not os.path.isfile(place) else None


def load_user_task(reference: str) -> "Task | ArrayTask":
    """Load a task here, in this process: what is wrong with it is better known now.

    Raises:
        CommandError: with what its code raised, or that it is no task.
    """
    from atoll.parallel.task.task import TaskNotFound, load_task

    try:
        return load_task(reference)
    except TaskNotFound as error:
        raise CommandError(str(error)) from error
    except Exception as error:  # the user's own code runs here
        raise CommandError(f"{reference}: cannot be loaded: {type(error).__name__}: {error}") from error


def _absolute(reference: str, folder: Path) -> str:
    place, _, attribute = reference.rpartition(":")
    return f"{os.path.abspath(folder / place)}:{attribute}" if _is_file(place) else reference


def _is_file(place: str) -> bool:
    return place.endswith(".py") or "/" in place
