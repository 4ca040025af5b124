"""`atoll compare`: train a task federated and centralized, and compare the two."""

import sys
from collections.abc import Sequence
from contextlib import AbstractContextManager
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from atoll.aggregation.printable import printable_size
from atoll.cli import options
from atoll.cli.experiments.rows import By, Columns, Csv, Markdown
from atoll.cli.printing import as_json, note, say
from atoll.cli.printing import table as say_table
from atoll.cli.stopping import INTERRUPTED, if_stopped
from atoll.operations.compare_runs import Shown, are_folders, check_one_task, compare_runs

if TYPE_CHECKING:
    from atoll.operations.training.request import Request
    from atoll.parallel.task.task import Task
    from atoll.simulations.experiments.compare import Side
    from atoll.simulations.federation.config import SimulationFile
    from atoll.simulations.federation.federation import Federation
    from atoll.simulations.federation.report import Json

PLOT = "compare.png"

What = Annotated[
    list[str],
    typer.Argument(
        metavar="TASK | RUN.toml | DIR...",
        help="A task, or the TOML of a simulated run, as for `atoll simulate`; or the folders of simulated runs or "
        "of sweeps, which are compared as they are.",
    ),
]
Rounds = Annotated[
    int | None, typer.Option("--rounds", metavar="N", help="Rounds of the federated run; short for rounds.")
]
Clients = Annotated[
    int | None,
    typer.Option(
        "--clients",
        metavar="N",
        help="Clients of the federated run, with an iid split of the data unless population.kind is set.",
    ),
]
Epochs = Annotated[
    int | None,
    typer.Option(
        "--epochs",
        metavar="N",
        help="Epochs of the centralized training; by default the federated run's number of passes over all data.",
    ),
]
Metric = Annotated[
    str | None,
    typer.Option(
        "--metric",
        metavar="GROUP/NAME",
        help="The metric to compare, such as server/accuracy; by default the first one.",
    ),
]
Target = Annotated[
    float | None,
    typer.Option("--target", metavar="X", help="Value of the metric: also report the cost of reaching it."),
]
Out = Annotated[
    Path | None,
    typer.Option("--out", metavar="DIR", help="The folder of both trainings; by default atoll-compare-NAME."),
]
Plot = Annotated[bool, typer.Option("--plot/--no-plot", help="Draw PNG files into the folder.")]


def compare(
    what: What,
    rounds: Rounds = None,
    clients: Clients = None,
    drop_empty: options.DropEmpty = False,
    epochs: Epochs = None,
    metric: Metric = None,
    target: Target = None,
    out: Out = None,
    overrides: options.Set = [],  # noqa: B006 - typer's way to say "none given"; never changed
    by: By = None,
    columns: Columns = None,
    markdown: Markdown = False,
    csv: Csv = False,
    plot: Plot = True,
    json: options.Json = False,
) -> None:
    """Train a task federated (as `atoll simulate`) and centralized (as `atoll train`), and compare them: metric, rounds
    or steps, bytes, virtual and real time.

    `--set train.*` and `plan.*` apply to the centralized training, `local.*` to both, all other settings to the
    federated run. Both continue after an interruption. Exit code 130 after Ctrl-C or SIGTERM.

    Of folders of simulated runs nothing is trained: those that differ in the seed alone are one row, with mean and
    deviation, and `--by` compares runs of different modes at the largest place that all have reached.
    """
    if_stopped("before a round began; nothing was written")
    shown = Shown(by, columns, markdown, csv, json)
    if are_folders(what):
        training = {"--rounds": rounds, "--clients": clients, "--epochs": epochs, "--set": overrides}
        not_used = [name for name, value in (training | {"--drop-empty": drop_empty}).items() if value]
        compare_runs([Path(folder) for folder in what], metric, target, shown, out, plot=plot, not_used=not_used)
        return
    check_one_task(what, shown)
    from atoll.operations.load import overriding

    short = overriding(overrides, population__drop_empty=drop_empty or None, train__epochs=epochs)
    asked = Asked(rounds, clients, epochs, metric, target, out, short)
    found = compare_trainings(what[0], asked, federated=_simulate, centralized=_train)
    if_stopped("")
    if json:
        as_json(found.document)
    else:
        _say(found.sides, target)
    if plot:
        _plot(found.sides, found.folder / PLOT)


def _simulate(file: "SimulationFile", task: "Task", folder: Path) -> "Json":
    """Simulate as a command does: it shows its progress, and a signal interrupts it."""
    from atoll.cli.experiments.interrupting import with_signals
    from atoll.cli.experiments.simulate import run_simulation
    from atoll.cli.experiments.simulation_progress import RoundProgress

    def begun(federation: "Federation") -> AbstractContextManager[None]:
        note("federated")
        return with_signals(federation)

    if_stopped("before a round began; the same command goes on")
    with RoundProgress(sys.stderr, note, rounds=file.rounds) as progress:
        result = run_simulation(file, task, folder, progress.round, handling=begun)
    if result["state"] == "interrupted":
        note("interrupted; the same command resumes it")
        raise typer.Exit(INTERRUPTED)
    if_stopped("after the federated training; the same command goes on")
    return result


def _train(request: "Request", task: "Task") -> None:
    """Train as a command does."""
    from atoll.operations.training.fault import Fault
    from atoll.operations.training.process import train_in_process
    from atoll.operations.training.request import job_of

    note("centralized")
    outcome = train_in_process(job_of(request, task), request)
    if isinstance(outcome, Fault):
        for line in outcome.lines:
            note(line)
        raise typer.Exit(outcome.code)
    if outcome.why == "interrupted":
        note("interrupted; the same command resumes it")
        raise typer.Exit(INTERRUPTED)


def _say(sides: "Sequence[Side]", target: float | None) -> None:
    from atoll.cli.printing import seconds
    from atoll.simulations.experiments.compare import COLUMNS, rows

    shown = {"bytes": printable_size, "virtual_s": seconds, "real_s": seconds}
    header = {"virtual_s": "virtual time", "real_s": "real time", "passes": "passes over the data"}
    lines = [
        [shown[name](row[name]) if name in shown and row[name] is not None else row[name] for name in COLUMNS]
        for row in rows(sides, target)
    ]
    say(sides[0].metric)
    say_table([header.get(name, name) for name in COLUMNS], lines, empty="")


def _plot(sides: "Sequence[Side]", path: Path) -> None:
    from atoll.simulations.experiments.compare import plot
    from atoll.simulations.experiments.plots import NoMatplotlib

    try:
        note(f"the plot is {plot(sides, path)}")
    except NoMatplotlib as error:
        note(str(error))
