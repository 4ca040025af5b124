"""The start of a run, its change, and statistics before it, at a running coordinator."""

from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from atoll.operations.place import is_elsewhere
from atoll.protocol.paging import Paging

if TYPE_CHECKING:
    from atoll.protocol.atoll_pb2 import RunReply
    from atoll.server.config.run import RunConfig, RunFile


def start_run(what: str, state: Path | None, overrides: Sequence[str]) -> "RunReply":
    """Start a run on a running coordinator.

    Args:
        what: the run's TOML, or a task.
        state: the coordinator's state directory; None: the TOML's, or the default.
        overrides: settings of the run, `key=value`.

    Raises:
        ConfigError: all mistakes in the settings.
        CommandError: no answer, or a refusal.
    """
    from atoll.operations import admin

    return admin.start(*_planned(what, state, overrides))


def resume_run(run: str, state: Path, overrides: Sequence[str], *, rounds: int | None = None) -> "RunReply":
    """Continue a paused run, or reopen an ended one, with changed settings; errors as `start_run`."""
    from atoll.operations import admin
    from atoll.operations.load import overriding

    return admin.resume(state, run, overriding(overrides, rounds=rounds))


def collect(what: str, state: Path | None, overrides: Sequence[str], deadline: float) -> tuple[Path, int]:
    """Ask the connected sites for statistics; return the state directory, and the number of the result.

    Args:
        what: the TOML of the planned run, or a task.
        state: the state directory, as in `start_run`; the errors, too, are as there.
        overrides: settings of the run, `key=value`.
        deadline: seconds in which sites may answer.
    """
    from atoll.operations.load import state_of

    file = _file_of(what, state, overrides)
    where = state_of(file, what, state)
    return where, _collected(where, file.run, deadline)


def collect_again(run: str, state: Path, database: str, deadline: float) -> int:
    """Ask the connected sites of a run's task for statistics, by the settings of the run; return the result's number.

    Args:
        run: id or name of the run.
        state: the coordinator's state directory.
        database: URL of the PostgreSQL database, as in `read_view`.
        deadline: seconds in which sites may answer.

    Raises:
        CommandError: there is no such run, no answer, or a refusal.
    """
    from atoll.operations.views import read_view
    from atoll.protocol.settings import load_text
    from atoll.server.config.run import RunFile

    toml = read_view("run", state, database, run=run, paging=Paging(bare=True))["toml"]
    return _collected(state, load_text(RunFile, toml, name=f"the run {run}").run, deadline)


def _collected(state: Path, run: "RunConfig", deadline: float) -> int:
    from atoll.operations import admin
    from atoll.protocol.settings import effective

    secure = run.secure  # its sum takes stages after the deadline for the sites' keys
    longer = 0.0 if secure is None else 5 * secure.attempts * secure.stage_timeout
    return admin.collect_statistics(state, effective(run), deadline, longer)


def sentence_of(reply: "RunReply") -> str:
    """Return the answer to a change of a run as a sentence."""
    return f"{reply.run_id} is {reply.state}" + (f": {reply.message}" if reply.message else "")


def _planned(what: str, state: Path | None, overrides: Sequence[str]) -> tuple[Path, str]:
    """Return the state directory of a run that its coordinator will get, and its effective settings."""
    from atoll.operations.load import state_of
    from atoll.protocol.settings import effective

    file = _file_of(what, state, overrides)
    return state_of(file, what, state), effective(file.run)


def _file_of(what: str, state: Path | None, overrides: Sequence[str]) -> "RunFile":
    """Return the file of a run that a running coordinator will get."""
    from atoll.operations.load import all_faults, load_run, note_unused_settings, state_of
    from atoll.server.config.run_changes import settings_of_the_host

    with all_faults(settings_of_the_host(overrides)):
        file = load_run(what, overrides, is_elsewhere=lambda file: is_elsewhere(state_of(file, what, state)))
    note_unused_settings(file, what, used=("state",), why="the coordinator is running already, with its own settings")
    return file
