"""The start of a simulation or of a centralized training from a version of a deployed run: exported into a file."""

from collections.abc import Sequence
from pathlib import Path

from atoll.operations.faults import CommandError
from atoll.operations.place import STATE
from atoll.operations.reporter import note
from atoll.operations.views import read_view
from atoll.protocol.vocabulary import TERMINAL
from atoll.server.config.model import BEST, run_and_version
from atoll.server.errors import StateUnusable

WHERE = {
    "model.start": "the run's coordinator.state names another directory",
    "train.start": f"the run is looked up at the joined coordinator, or in {STATE} here: run the command beside it",
}
"""The place of the state directory whose run is named, by the setting."""


def file_of_start(start: str, *, setting: str, state: Path = STATE) -> str:
    """Return the file of a start: one that it names, or a version of a run, which is exported into this folder.

    The run is one of the state directory, or of the joined coordinator. The same version is the
    same file, `atoll-start-RUN-VERSION.safetensors`, so the same command resumes an interrupted run.

    Args:
        start: a path, or `run:NAME[@VERSION]`.
        setting: the name of the setting, for messages.
        state: the state directory of the run.

    Raises:
        CommandError: there is no such run or version; or it is not fixed yet which one is meant.
        OSError: the state directory cannot be read, or the file cannot be written.
    """
    if (named := run_and_version(start)) is None:
        return start
    from atoll.operations import model_export

    name, wanted = named
    try:
        seen = read_view("versions", state, run=name)
        phase = read_view("run", state, run=name)["document"]["state"]
        if not wanted.isdecimal() and phase not in TERMINAL:
            raise CommandError(f"run {seen['run']} is {phase}, and its versions change: name one, run:{name}@NUMBER")
        newest = max((int(row["version"]) for row in seen["rows"]), default=0)
        version = model_export.best_version(seen) if wanted == BEST else int(wanted) if wanted else newest
        out = Path(f"atoll-start-{seen['run']}-{version}.safetensors")
        exported = model_export.export(state, seen["run"], version, out)
    except CommandError as error:
        raise CommandError(*(f"{setting}: got {start!r}: {fault}" for fault in error.faults)) from error
    except StateUnusable as error:
        raise CommandError(f"{setting}: got {start!r}: {error}; {WHERE[setting]}") from error
    note(f"{setting}: version {exported.version} of {exported.run} is in {out}")
    return str(out.absolute())


def with_start_file(overrides: Sequence[str]) -> list[str]:
    """Return the overrides of a centralized training, whose `train.start` is a file; errors as in `file_of_start`."""
    key = "train.start"
    found = []
    for override in overrides:
        name, equals, value = override.partition("=")
        is_start = name.strip() == key and run_and_version(value.strip().strip("\"'")) is not None
        file = file_of_start(value.strip().strip("\"'"), setting=key) if is_start else ""
        found.append(f"{key}={file}" if file else f"{name}{equals}{value}")
    return found
