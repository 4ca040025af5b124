"""`atoll coordinator`: host runs in this process until they have ended."""

from collections.abc import Callable
from contextlib import ExitStack
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from atoll.cli import options
from atoll.cli.command import current, if_stopped
from atoll.cli.printing import note, say_settings
from atoll.cli.waiting import waiting_for
from atoll.ground.printable import shortened
from atoll.ground.process.loading import loading
from atoll.ground.version import __version__
from atoll.operations.faults import CommandError
from atoll.task.apps import is_app

if TYPE_CHECKING:
    from atoll.server.config.process import HostFile
    from atoll.server.config.run import RunFile
    from atoll.server.hosting.coordinator import Coordinator
    from atoll.server.ports import Ports
    from atoll.task.array_task import ArrayTask
    from atoll.telemetry.start import Telemetry

What = Annotated[
    str | None,
    typer.Argument(
        metavar="[TASK | RUN.toml]",
        help="A run's TOML, or a task (`module:attribute`, `path/to/file.py:attribute`, the folder of a Flower app) to "
        "run with the defaults. "
        "Without it the coordinator continues the runs of its state directory, and waits for more.",
    ),
]
State = Annotated[
    Path | None,
    typer.Option("--state", metavar="DIR", help="Directory of all durable state; short for coordinator.state."),
]
Database = Annotated[
    str | None,
    typer.Option(
        "--database",
        metavar="URL",
        help="Store the journal and the records in PostgreSQL: postgresql://USER@HOST/DATABASE, the password in "
        "PGPASSFILE; short for coordinator.database.",
    ),
]
Again = Annotated[
    bool, typer.Option("--again", help="Start a new run even if a run with exactly these settings has ended.")
]
Aggregators = Annotated[
    int | None,
    typer.Option(
        "--aggregators",
        metavar="N",
        help="Shard the aggregation over N ranks, each a process on this machine; short for coordinator.aggregators.",
    ),
]
AcceptClock = Annotated[
    bool,
    typer.Option(
        "--accept-clock",
        help="Start although this machine's clock is minutes ahead of or behind the journal's last true time, "
        "because the clock is right now. The audit log records this.",
    ),
]
AcceptLosses = Annotated[
    bool,
    typer.Option(
        "--accept-losses",
        help="Start although files are missing or damaged that the journal relies on: accepted updates end as lost, "
        "and a run without its model fails. The audit log records this.",
    ),
]
Published = Annotated[
    list[str],
    typer.Option(
        "--published",
        metavar="[RUN=]ROUND",
        help="The newest published round of a private run (with noise by the clients the newest that has begun), for "
        "the first start after `atoll restore`: all clients are charged for every round since the backup. The audit "
        "log records this.",
    ),
]
Stay = Annotated[bool, typer.Option("--stay", help="Do not end with the last run; `atoll run start` adds more.")]


def coordinator(
    what: What = None,
    state: State = None,
    database: Database = None,
    aggregators: Aggregators = None,
    overrides: options.Set = [],  # noqa: B006 - typer's way to say "none given"; never changed
    insecure: options.Insecure = None,
    metrics: options.Metrics = None,
    again: Again = False,
    stay: Stay = False,
    accept_clock: AcceptClock = False,
    accept_losses: AcceptLosses = False,
    published: Published = [],  # noqa: B006 - as `overrides`
    check: options.Check = False,
    json: options.CheckJson = False,
    log_form: options.Log = "text",
) -> None:
    """Host runs: invite clients, collect their updates, aggregate them, commit the new version.

    A run that an earlier process left open continues where it stopped. A run that has ended is not started again,
    except with other settings or with --again, so that a supervisor may restart this command at any time. Exit code 0:
    every run has finished, or a signal came; 1: a run failed or was stopped.
    """
    if_stopped("before it listened")
    from atoll.operations.load import load_host, overriding
    from atoll.protocol.notices.settings import faults_of_machine
    from atoll.server.config.run import RunFile

    options.json_only_with(check, json)
    given = {"state": state, "database": database, "aggregators": aggregators, "insecure": insecure}
    given["metrics"] = metrics
    file = load_host(what, overriding(overrides, **{f"coordinator__{name}": value for name, value in given.items()}))
    if faults := faults_of_machine(file.notify):
        raise CommandError(*faults)
    if check:
        _check(file, json)
        return
    from atoll.cli import log
    from atoll.cli.serving.metrics import opened

    log.configure("coordinator", form=log_form)
    note(f"atoll {__version__}: the coordinator starts, state in {file.coordinator.state}")
    run = file.run if isinstance(file, RunFile) else None
    accepted = {"clock": accept_clock, "losses": accept_losses, "published": _rounds(published)}
    with opened("coordinator", file.coordinator.metrics) as telemetry:
        raise typer.Exit(_host(file, accepted, telemetry, again=again, stay=stay or run is None))


def _rounds(published: list[str]) -> dict[str, int]:
    """Return the named rounds by run; raises CommandError."""
    found, faults = dict[str, int](), list[str]()
    for text in published:
        run, _, number = text.rpartition("=")
        if not (number.isascii() and number.isdigit()) or run in found:
            faults.append(f"--published: got {shortened(text)}; allowed: RUN=ROUND, once for a run, as digits-1=7")
        else:
            found[run] = int(number)
    if faults:
        raise CommandError(*faults)
    return found


def _check(file: "HostFile | RunFile", json: bool) -> None:
    """Check the settings, the files that the journal relies on and a run's task, and print the effective settings."""
    from atoll.operations.load import check_folder
    from atoll.protocol.settings import effective
    from atoll.server.config.run import RunFile
    from atoll.server.config.secure import WITHOUT_CERTIFICATES

    check_folder("coordinator.state", file.coordinator.state)
    _check_files(file.coordinator.state, file.coordinator.database or "")
    if isinstance(file, RunFile):
        if file.run.secure is not None and file.coordinator.insecure:
            raise CommandError(WITHOUT_CERTIFICATES)
        _check_task(file)
    say_settings(effective(file), json=json)


def _check_files(state: Path, database: str) -> None:
    """Read every file that the journal of a state directory relies on; no process of it needs to be stopped.

    Raises:
        CommandError: an open run lacks some; of a run that has ended they are noted.
    """
    from atoll.server.journal.binding import has_state
    from atoll.server.required.losses import WAY_OUT, lines_of, losses_in

    if not has_state(state):
        return
    with waiting_for(f"the files of {state}", "each is compared with its digest"):
        losses = losses_in(state, database)
    for line in lines_of(loss for loss in losses if not loss.is_open):
        note(line)
    if found := [loss for loss in losses if loss.is_open]:
        raise CommandError(*lines_of(found), WAY_OUT)
    note(f"{state} has every file on which its open runs rely, undamaged")


def _check_task(file: "RunFile") -> None:
    """Load a run's task, sampler and rule in this process, and apply the overrides of its local training.

    Raises:
        CommandError: all faults: of the task, of its overrides, of the sampler and of the rule.
    """
    from atoll.operations.load import load_user_task
    from atoll.protocol.settings import ConfigError
    from atoll.task.overrides import OverridesRefused
    from atoll.task.task import Task

    def check(task: "Task | ArrayTask") -> None:
        if isinstance(task, Task):
            task.local.with_overrides(file.local)

    faults: list[str] = []
    builds: tuple[Callable[[], object], ...] = (
        lambda: None if is_app(file.task) else check(load_user_task(file.task)),  # an app's main() has run already
        file.cohort.build,
        file.aggregation.build,
        file.aggregation.open_codec,
    )
    for build in builds:
        try:
            build()
        except (CommandError, ConfigError, OverridesRefused) as error:
            faults += error.faults
    if faults:
        raise CommandError(*faults)


def _host(
    file: "HostFile | RunFile", accepted: dict[str, Any], telemetry: "Telemetry | None", *, again: bool, stay: bool
) -> int:
    import asyncio

    with loading():
        from atoll.cli.serving.metrics import serve_coordinator
        from atoll.operations.temporary import writing_to
        from atoll.protocol import service_manager
        from atoll.protocol.build import software
        from atoll.server.config.run import RunFile
        from atoll.server.process import Accepted, host

    starting = ExitStack()

    def ready(coordinator: "Coordinator", ports: "Ports") -> None:
        starting.close()
        if telemetry is not None:
            serve_coordinator(telemetry, coordinator, ports)
        service_manager.tell(service_manager.READY, f"listening on {ports.address}")
        note(f"atoll coordinator on {ports.address}, state in {file.coordinator.state}; {software()}")
        if ports.enrolment is not None:
            note(f"invite a site: atoll client invite NAME --state {file.coordinator.state}")
        else:
            note("insecure: no certificates and no encryption, so it listens on loopback only")
        if stay and not coordinator.runs:
            note(f"no run yet: atoll run start RUN.toml --state {file.coordinator.state}")

    run = file.run if isinstance(file, RunFile) else None
    where = file.coordinator.state
    starting.enter_context(
        waiting_for(f"the state in {where} and its tasks", "the coordinator listens once they are loaded")
    )
    hosting = host(
        file.coordinator,
        run,
        again=again,
        stay=stay,
        accepts=Accepted(**accepted),
        notify=file.notify,
        on_ready=ready,
        on_end=current().end_in_time,
    )
    with starting, writing_to("coordinator.state", where):
        return asyncio.run(hosting)
