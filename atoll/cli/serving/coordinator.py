"""`atoll coordinator`: host runs, in this process, until they have ended."""

import asyncio
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from atoll.cli import options
from atoll.cli.faults import CommandError, without_frames
from atoll.cli.printing import note, say
from atoll.cli.shutdown_deadline import end_in_time

if TYPE_CHECKING:
    from atoll.server.config.process import HostFile
    from atoll.server.config.run import RunFile
    from atoll.server.hosting.coordinator import Coordinator
    from atoll.server.ports import Ports

What = Annotated[
    str | None,
    typer.Argument(
        metavar="[TASK | RUN.toml]",
        help="A run's TOML, or a task (`module:attribute` or `path/to/file.py:attribute`) to run with the defaults. "
        "Without it the coordinator goes on with the runs that its state directory knows, and waits for others.",
    ),
]
State = Annotated[
    Path | None, typer.Option("--state", metavar="DIR", help="Where everything is kept; short for coordinator.state.")
]
Database = Annotated[
    str | None,
    typer.Option(
        "--database",
        metavar="URL",
        help="Keep the journal and the records in PostgreSQL: postgresql://USER@HOST/DATABASE, the password in "
        "PGPASSFILE; short for coordinator.database.",
    ),
]
Again = Annotated[
    bool, typer.Option("--again", help="Begin a new run also when the last one with these very settings has ended.")
]
Aggregators = Annotated[
    int | None,
    typer.Option(
        "--aggregators",
        metavar="N",
        help="Spread the aggregation over N ranks, processes on this machine; short for coordinator.aggregators.",
    ),
]
Stay = Annotated[bool, typer.Option("--stay", help="Stay when every run has ended; more may be started.")]


def coordinator(
    what: What = None,
    state: State = None,
    database: Database = None,
    aggregators: Aggregators = None,
    overrides: options.Set = [],  # noqa: B006 - typer's way to say "none given"; never changed
    insecure: options.Insecure = None,
    again: Again = False,
    stay: Stay = False,
    check: options.Check = False,
) -> None:
    """Host runs: invite clients, wait for their updates, aggregate, commit.

    A run that an earlier process left open goes on where it stopped; one that has ended is not begun again, unless
    asked to or with other settings, so that a supervisor may start this command as often as it likes. Ends with 0 when
    every run has finished or a signal came, with 1 when a run failed or was stopped.
    """
    from atoll.cli.files import load_host, overriding
    from atoll.server.config.run import RunFile

    own = {"state": state, "database": database, "aggregators": aggregators, "insecure": insecure}
    file = load_host(what, overriding(overrides, **{f"coordinator__{name}": value for name, value in own.items()}))
    if check:
        _check(file)
        return
    from atoll.cli import log

    log.configure()
    run = file.run if isinstance(file, RunFile) else None
    raise typer.Exit(_host(file, again=again, stay=stay or run is None))


def _check(file: "HostFile | RunFile") -> None:
    """Load the task as the worker would; what is wrong with it is better known now."""
    from atoll.protocol.settings import effective
    from atoll.server.config.run import RunFile

    if isinstance(file, RunFile):
        _check_task(file)
    say(effective(file).rstrip("\n"))


def _check_task(file: "RunFile") -> None:
    """Load a run's task, sampler and rule here, and try the overrides of its local training.

    Raises:
        CommandError, ConfigError: with what is wrong.
    """
    from atoll.cli.files import load_user_task
    from atoll.parallel.task.overrides import OverridesRefused
    from atoll.parallel.task.task import Task

    task = load_user_task(file.task)
    file.cohort.build()
    file.aggregation.build()
    if isinstance(task, Task):
        try:
            task.local.with_overrides(file.local)
        except OverridesRefused as error:
            raise CommandError(*error.faults) from error


def _host(file: "HostFile | RunFile", *, again: bool, stay: bool) -> int:
    from atoll.server.config.run import RunFile
    from atoll.server.errors import OperatorError
    from atoll.server.process import host

    def ready(coordinator: "Coordinator", ports: "Ports") -> None:
        note(f"atoll coordinator on {ports.address}, state in {file.coordinator.state}")
        if ports.enrolment is not None:
            note(f"a site becomes a member by: atoll client invite NAME --state {file.coordinator.state}")
        else:
            note("insecure: nobody proves anything, so everybody is on this machine")
        if stay and not coordinator.runs:
            note(f"no run yet: atoll run start RUN.toml --state {file.coordinator.state}")

    run = file.run if isinstance(file, RunFile) else None
    try:
        return asyncio.run(host(file.coordinator, run, again=again, stay=stay, on_ready=ready, on_end=end_in_time))
    except OperatorError as error:
        raise CommandError(*without_frames(str(error))) from error
