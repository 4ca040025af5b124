"""`atoll export`: a run's settings, numbers and state for TensorBoard, MLflow, Weights & Biases or a file of JSON."""

import time
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from atoll.cli import options
from atoll.cli.printing import as_json, note, say
from atoll.ground.printable import count_of
from atoll.operations.faults import CommandError
from atoll.operations.place import STATE

if TYPE_CHECKING:
    from collections.abc import Callable

    from atoll.exports.exporter import Source
    from atoll.exports.tools import Target

DEFAULT = Path("atoll-exports")
"""The folder of the exports of deployed runs, where no other place is given."""

OTLP = "otlp"
"""The tool that is a receiver of OpenTelemetry's protocol."""

Tool = Annotated[str, typer.Argument(metavar="TOOL", help="tensorboard, mlflow, wandb, jsonl or otlp.")]
What = Annotated[
    str,
    typer.Argument(
        metavar="RUN | DIR",
        help="Id or name of a coordinator's run, or the folder of `atoll simulate`, `atoll train` or `atoll sweep`.",
    ),
]
To = Annotated[
    str,
    typer.Option(
        "--to",
        metavar="PLACE",
        help="The folder of the export, for mlflow also an address such as http://HOST:5000 or sqlite:///FILE; by "
        "default a folder of the tool's name in DIR, or in atoll-exports. For otlp the receiver, such as "
        "http://127.0.0.1:4318, by default OTEL_EXPORTER_OTLP_ENDPOINT.",
    ),
]
Follow = Annotated[
    bool, typer.Option("--follow", help="Keep exporting until the run has ended; Ctrl-C stops the export.")
]
Sites = Annotated[
    bool | None,
    typer.Option(
        "--sites/--no-sites",
        help="Export the values of each site that its policy shows; by default of at most 100 sites.",
        show_default=False,
    ),
]
State = Annotated[
    Path | None,
    typer.Option(
        "--state", metavar="DIR", help="The coordinator's state directory; by default atoll-state.", show_default=False
    ),
]


def export(
    tool: Tool,
    what: What,
    to: To = "",
    follow: Follow = False,
    sites: Sites = None,
    state: State = None,
    database: options.Database = "",
    json: options.Json = False,
) -> None:
    """Export a run's settings, rounds, metrics and state to TensorBoard, MLflow, Weights & Biases or a file of JSON.

    The same command resumes where it stopped, however it ended: it reads what the place has, and writes what is
    missing. Nothing leaves this machine, unless `--to` is the address of a server. With `--state` or `--database` the
    argument is a run's id, otherwise a folder of that name comes first. `otlp` sends a trace for each round of a
    coordinator's run, and with `--sites` the metrics of its sites; a span that is sent again has the same id.
    """
    from atoll.exports.tools import Target, checked

    if tool == OTLP:
        from atoll.cli.exports.otlp import export_otlp

        _check_place(what, state, database)
        place = (state or STATE, database)
        found = [export_otlp(what, to, place, DEFAULT / OTLP, follow=follow, sites=sites or False)]
        _tell(found, "span", as_document=json)
        return
    (target,) = checked([Target(tool, to)], "TOOL", of_place="--to", others=(OTLP,))
    if state is None and not database and Path(what).is_dir():
        found = _of_folder(target, Path(what), follow, sites)
    else:
        _check_place(what, state, database)
        found = [_of_run(target, what, state or STATE, database, follow, sites)]
    _tell(found, "row", as_document=json)


def _tell(found: list[dict[str, Any]], what: str, *, as_document: bool) -> None:
    """Print the outcome of each export."""
    if as_document:
        as_json(found)
        return
    for row in found:
        say(f"{row['run']} ({row['state']}): {count_of(row['rows'], what)} written to {row['place']}")


def _check_place(what: str, state: Path | None, database: str) -> None:
    """Check that a folder, a state directory or a database is named in which the run may be."""
    from atoll.operations.place import is_elsewhere

    if state is None and not database and not STATE.exists() and not is_elsewhere(STATE):
        raise CommandError(
            f"{what}: there is no such folder, and no state directory {STATE} with such a run: name the folder "
            "of a run, or the state directory with --state DIR"
        )


def _of_folder(target: "Target", folder: Path, follow: bool, sites: bool | None) -> list[dict[str, Any]]:
    """Export the runs in a folder."""
    from atoll.exports.folders import SimulatedFolder, sources_in

    sources = sources_in(folder, sites=sites)
    if follow and len(sources) > 1:
        raise CommandError(
            f"--follow: {folder} has {count_of(len(sources), 'run')}; allowed: the folder of one run; or leave "
            "--follow out, and repeat the command: it resumes where it stopped"
        )
    for source in sources:
        if isinstance(source, SimulatedFolder) and (left_out := source.note()):
            note(left_out)
    wait = _wait_for(folder) if follow else None
    return [_exported(target.at(folder), source, wait) for source in sources]


def _wait_for(folder: Path) -> "Callable[[float], None]":
    """Return the function that waits for news of a run in a folder; it notes once if no process runs it."""
    from atoll.server.journal.holder import is_held
    from atoll.simulations.experiments.report import ROUNDS

    is_unattended = (folder / ROUNDS).exists() and not is_held(folder)

    def wait(seconds: float) -> None:
        nonlocal is_unattended
        if is_unattended:
            note(f"{folder}: no process runs this simulation: start it, and the export continues")
            is_unattended = False
        time.sleep(seconds)

    return wait


def _of_run(target: "Target", run: str, state: Path, database: str, follow: bool, sites: bool | None) -> dict[str, Any]:
    """Export a run of a coordinator."""
    from atoll.cli.exports.deployed import DeployedRun, News
    from atoll.operations.admin import NoAnswer
    from atoll.server.errors import DatabaseAway

    source = DeployedRun(run, state, database, sites=sites)
    wait = News(source.about().name if follow else run, state, database).wait if follow else None
    return _exported(target.at(DEFAULT), source, wait, (NoAnswer, DatabaseAway))


def _exported(
    target: "Target",
    source: "Source",
    wait: "Callable[[float], None] | None",
    passing: tuple[type[Exception], ...] = (),
) -> dict[str, Any]:
    """Export a run, with `wait` until it has ended; return the outcome in JSON types."""
    from atoll.exports import exporter
    from atoll.exports.destination import DestinationAway
    from atoll.operations.temporary import TryAgain

    destination = target.open()
    try:
        destination.check()
        about = source.about()
        destination.begin(about)
        if wait is None:
            rows, state = exporter.export(source, destination)
        else:
            rows, state = exporter.follow(source, destination, wait=wait, passing=passing)
    except DestinationAway as error:
        raise TryAgain(f"{error}; the same command resumes it") from error
    finally:
        destination.close()
    return {
        "run": about.name,
        "id": about.id,
        "tool": target.tool,
        "place": destination.place,
        "rows": rows,
        "state": state.state,
    }
