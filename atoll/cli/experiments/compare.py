"""`atoll compare`: train a task federated and centralized, and compare the two."""

import sys
from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from atoll.cli import options
from atoll.cli.command import if_stopped
from atoll.cli.experiments.rows import Csv, Markdown, check_formats, draw, say_rows
from atoll.cli.group import TERMINAL
from atoll.cli.printing import as_json, note, say
from atoll.cli.printing import table as say_table
from atoll.cli.requested import requested
from atoll.ground.printable import printable_size
from atoll.operations.faults import CommandError, Interrupted
from atoll.operations.reporter import reporting_to
from atoll.operations.requests import CompareRequest

if TYPE_CHECKING:
    from atoll.operations.requests import TrainRequest
    from atoll.simulations.experiments.compare import Side
    from atoll.simulations.federation.config import SimulationFile
    from atoll.simulations.federation.report import Json
    from atoll.task.task import Task

PLOT, FOLDER = "compare.png", Path("atoll-compare-runs")
"""The plot file of a comparison that trains, and the default plot folder of a comparison of runs."""

Plot = Annotated[bool, typer.Option("--plot/--no-plot", help="Draw PNG files into the folder.")]


@requested(CompareRequest)
def compare(
    request: CompareRequest,
    markdown: Markdown = False,
    csv: Csv = False,
    plot: Plot = True,
    json: options.Json = False,
) -> None:
    """Train a task federated (as `atoll simulate`) and centralized (as `atoll train`), and compare them.

    The table has the metric, rounds or steps, bytes, virtual and real time.

    `--set train.*` and `plan.*` apply to the centralized training, `local.*` to both, all other settings to the
    federated run. Both continue after an interruption. Exit code 130 after Ctrl-C or SIGTERM.

    Given folders of simulated runs, it trains nothing: runs that differ in the seed alone are one row, with mean and
    deviation, and `--by` compares runs of different modes at the largest place that all have reached.
    """
    if_stopped("before a round began; nothing was written")
    if all(Path(each).is_dir() for each in request.what):
        from atoll.operations.compare_runs import compare_runs

        check_formats(request.by, markdown=markdown, csv=csv, json=json)
        runs = compare_runs(request)
        say_rows(runs.rows, runs.objective, markdown=markdown, csv=csv, json=json)
        if plot:
            draw(runs.drawn, request.out or FOLDER, runs.objective)
        return
    _check_one_task(request, {"--markdown": markdown, "--csv": csv})
    from atoll.operations.compare import compare_trainings

    found = compare_trainings(request, federated=_simulate, centralized=_train)
    if_stopped("")
    if json:
        as_json(found.document)
    else:
        _say(found.sides, request.target)
    if plot:
        _plot(found.sides, found.folder / PLOT)


def _check_one_task(request: CompareRequest, formats: Mapping[str, bool]) -> None:
    """Check the arguments of a comparison that trains.

    Args:
        request: the request.
        formats: the options of a table of runs, with whether they are given.

    Raises:
        CommandError: all mistakes.
    """
    given = {"--by": request.by, "--columns": request.columns, **formats}
    faults = [
        f"{name} applies only to folders of simulated runs: leave it out, or name such folders"
        for name, value in given.items()
        if value
    ]
    if len(request.what) > 1:
        faults.append(f"got {' '.join(request.what)}; allowed: one task or TOML, or folders of simulated runs")
    if faults:
        raise CommandError(*faults)


def _simulate(file: "SimulationFile", task: "Task", folder: Path) -> "Json":
    """Simulate as a command does: it shows its progress, and a signal interrupts it."""
    from atoll.cli.experiments.simulation_progress import RoundProgress
    from atoll.operations.simulate import run_simulation

    def begun(interrupt: Callable[[], object]) -> AbstractContextManager[None]:
        note("federated")  # the settings have no fault
        return TERMINAL.interrupting(interrupt)

    if_stopped("before a round began; the same command resumes it")
    with (
        reporting_to(replace(TERMINAL, interrupting=begun)),
        RoundProgress(sys.stderr, note, rounds=file.rounds) as progress,
    ):
        result = run_simulation(file, task, folder, progress.round)
    if result["state"] == "interrupted":
        raise Interrupted
    if_stopped("after the federated training; the same command resumes it")
    return result


def _train(request: "TrainRequest", task: "Task") -> None:
    """Train centrally as a command does: it shows its progress, and a signal interrupts it."""
    from atoll.cli.training.train import train_in_process
    from atoll.operations.training.job import job_of

    note("centralized")
    if train_in_process(job_of(request, task), request).why == "interrupted":
        raise Interrupted


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
