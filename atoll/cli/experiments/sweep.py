"""`atoll sweep`: every combination of a grid of settings as a simulated run, and a table and plots of all of them."""

import signal
import sys
from collections.abc import Iterator, Mapping, Sequence
from contextlib import chdir, contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from atoll.cli import options
from atoll.cli.faults import CommandError
from atoll.cli.printing import as_json, note, say
from atoll.cli.printing import table as say_table

if TYPE_CHECKING:
    from atoll.parallel.task.array_task import ArrayTask
    from atoll.parallel.task.task import Task
    from atoll.simulations.experiments.grid import Cell, Grid
    from atoll.simulations.experiments.report import RunReport
    from atoll.simulations.experiments.requested_metric import RequestedMetric
    from atoll.simulations.experiments.sweep import Progress, State
    from atoll.simulations.experiments.table import Row

What = Annotated[
    Path, typer.Argument(metavar="GRID", help="A run's TOML with a table \\[grid]; docs/experiments.md has an example.")
]
Out = Annotated[
    Path | None, typer.Option("--out", metavar="DIR", help="Where the cells are; by default atoll-sweep-NAME.")
]
Jobs = Annotated[
    int | None,
    typer.Option("--jobs", metavar="N", callback=options.between(1), help="Runs at once; by default sweep.jobs."),
]
Metric = Annotated[
    str | None, typer.Option("--metric", metavar="WHO/NAME", help="Such as server/accuracy; by default sweep.metric.")
]
Target = Annotated[float | None, typer.Option("--target", metavar="X", help="Of the metric; by default sweep.target.")]
Columns = Annotated[
    str | None, typer.Option("--columns", metavar="A,B", help="Of the table; by default sweep.columns.")
]
Show = Annotated[bool, typer.Option("--show", help="Run nothing: show what there is.")]
Check = Annotated[
    bool, typer.Option("--check", help="Run nothing: check every cell as `atoll simulate --check` does, and list them.")
]
Markdown = Annotated[bool, typer.Option("--markdown", help="Print the table as Markdown.")]
Plot = Annotated[bool, typer.Option("--plot/--no-plot", help="Whether to draw PNG files into DIR/plots.")]


def sweep(
    grid_file: What,
    out: Out = None,
    jobs: Jobs = None,
    metric: Metric = None,
    target: Target = None,
    columns: Columns = None,
    overrides: options.Set = [],  # noqa: B006 - typer's way to say "none given"; never changed
    show: Show = False,
    check: Check = False,
    markdown: Markdown = False,
    plot: Plot = True,
    json: options.Json = False,
) -> None:
    """Simulate every combination of a grid of settings, several at once, and compare them in a table and in plots.

    Finished cells are not run again and interrupted ones go on, so the same command finishes a sweep that was cut off.
    It ends with 1 when a cell has failed, with 130 after Ctrl-C or SIGTERM.
    """
    from atoll.simulations.experiments.grid import read_grid
    from atoll.simulations.experiments.sweep import Progress
    from atoll.simulations.experiments.table import Objective, chosen, rows

    grid = read_grid(grid_file, overrides)
    folder = out or Path(f"atoll-sweep-{grid_file.stem}")
    wanted = target if target is not None else grid.sweep.target
    names = chosen(columns.split(",") if columns else grid.sweep.columns, wanted)
    asked_for = _wanted(metric, grid)
    if not show:
        _check(grid, grid.cells if check else _unfinished(grid, folder), asked_for)
    elif asked_for is not None:
        asked_for.check_name()
    if check:
        _say_cells(grid, json)
        return
    progress = Progress() if show else _run(grid, folder, jobs or grid.sweep.jobs, asked_for)
    found = list(_found(grid, folder, progress.states))
    reports = [report for _, report, _ in found if report is not None]
    if not reports:
        raise CommandError(f"{folder}: no cell has a report yet; the last words of each are in its log.txt")
    if asked_for is not None:
        asked_for.is_measured(reports, is_over=all(state == "finished" for _, _, state in found))
    from atoll.simulations.experiments.plots import main_metric

    asked = Objective(asked_for.metric if asked_for is not None else main_metric(reports), wanted)
    lines = rows(found, asked, names, grid.sweep.over)
    if json:
        as_json({"metric": asked.metric, "target": asked.target, "rows": lines})
    else:
        _say_rows(lines, names, asked.metric, markdown)
    if plot:
        _plot(grid, found, folder / "plots", asked.metric)
    if "failed" in progress.states.values():
        raise typer.Exit(1)


def _wanted(metric: str | None, grid: "Grid") -> "RequestedMetric | None":
    """The metric that somebody has asked for."""
    from atoll.simulations.experiments.requested_metric import RequestedMetric

    if metric is not None:
        return RequestedMetric(metric, "--metric")
    return None if grid.sweep.metric is None else RequestedMetric(grid.sweep.metric, "sweep.metric")


def _run(grid: "Grid", folder: Path, jobs: int, asked_for: "RequestedMetric | None") -> "Progress":
    from atoll.cli.experiments.sweep_progress import MetricWatch, SweepProgress
    from atoll.simulations.experiments.sweep import last_words, run_cells

    def reports(progress: "Progress") -> "list[RunReport]":
        return [report for _, report, _ in _found(grid, folder, progress.states) if report is not None]

    watching = SweepProgress(sys.stderr, note, grid, lambda name: last_words(folder / name))
    looking = MetricWatch(asked_for, reports) if asked_for is not None else None

    def watch(progress: "Progress") -> None:
        watching.see(progress)
        if looking is not None:
            looking.see(progress)

    try:
        with _told_to_stop():
            return run_cells(grid, folder, jobs=jobs, watch=watch)
    except KeyboardInterrupt:
        note("interrupted; the same command goes on from here")
        raise typer.Exit(130) from None
    finally:
        watching.close()


@contextmanager
def _told_to_stop() -> Iterator[None]:
    """SIGTERM does what Ctrl-C does: the runs are ended first."""

    def told(_number: int, _frame: object) -> None:
        raise KeyboardInterrupt

    before = signal.signal(signal.SIGTERM, told)
    try:
        yield
    finally:
        signal.signal(signal.SIGTERM, before)


def _found(grid: "Grid", folder: Path, states: "Mapping[str, State]") -> "Iterator[tuple[Cell, RunReport | None, str]]":
    from atoll.simulations.experiments.report import NoReport, read_run
    from atoll.simulations.experiments.sweep import is_finished

    for cell in grid.cells:
        place = folder / cell.folder
        state = states.get(cell.folder) or ("finished" if is_finished(place) else "unfinished")
        try:
            yield cell, read_run(place, cell.name), state
        except NoReport:
            yield cell, None, state


def _unfinished(grid: "Grid", folder: Path) -> "list[Cell]":
    from atoll.simulations.experiments.sweep import is_finished

    return [cell for cell in grid.cells if not is_finished(folder / cell.folder)]


def _check(grid: "Grid", cells: "Sequence[Cell]", asked_for: "RequestedMetric | None") -> None:
    """What can be known before the first cell runs.

    Args:
        grid: of the cells.
        cells: those to be tried with their task: others have run.
        asked_for: the metric; None: nobody has named one.

    Raises:
        ConfigError: with all that is wrong.
    """
    from atoll.protocol.settings import ConfigError, or_faults
    from atoll.simulations.experiments.sweep import check_cells

    faults: list[str] = []
    or_faults(lambda: check_cells(grid.cells), faults)
    if asked_for is not None:
        or_faults(asked_for.check_name, faults)
    if not faults and cells:
        task = _task_of(grid)
        or_faults(lambda: _try_cells(grid, cells, task), faults)
        if asked_for is not None:
            or_faults(lambda: asked_for.check_start(task, grid.cells), faults)
    if faults:
        raise ConfigError(faults)


def _task_of(grid: "Grid") -> "Task | ArrayTask":
    """All cells have the same; it lies where the grid's file says."""
    from atoll.cli.experiments.simulate import simulated
    from atoll.cli.files import load_user_task
    from atoll.simulations.experiments.sweep import overrides

    with chdir(grid.folder):
        one = grid.cells[0]
        return load_user_task(simulated(one.task, overrides(one), rounds=None, clients=None).task)


def _try_cells(grid: "Grid", cells: "Sequence[Cell]", task: "Task | ArrayTask") -> None:
    """As `atoll simulate --check` does with each of them, from the grid's folder.

    Raises:
        ConfigError: with all faults of all cells.
    """
    from atoll.cli.experiments.simulate import simulated
    from atoll.cli.experiments.task_failures import task_failures_in_one_line
    from atoll.protocol.settings import ConfigError
    from atoll.simulations.experiments.sweep import check_cells, overrides
    from atoll.simulations.federation.setting import setting_of

    def check(cell: "Cell") -> None:
        try:
            file = simulated(cell.task, overrides(cell), rounds=None, clients=None)
            with task_failures_in_one_line():
                setting_of(file, task)
        except CommandError as error:
            raise ConfigError(error.faults) from error

    with chdir(grid.folder):
        check_cells(cells, check)


def _say_cells(grid: "Grid", json: bool) -> None:
    if json:
        as_json([{"folder": cell.folder, "task": cell.task, "settings": cell.settings} for cell in grid.cells])
        return
    say_table([*grid.columns, "folder"], [[*cell.varied.values(), cell.folder] for cell in grid.cells], empty="")


def _say_rows(lines: "Sequence[Row]", names: Sequence[str], metric: str, markdown: bool) -> None:
    from atoll.simulations.experiments.table import markdown as as_markdown

    shown = {"final": f"final {metric}", "best": f"best {metric}"}
    has_open = any(row.state != "finished" for row in lines)
    header = [*lines[0].varied, *(shown.get(name, name) for name in names), *(["state"] if has_open else [])]
    body = [[*row.varied.values(), *map(str, row.values.values()), *([row.state] if has_open else [])] for row in lines]
    if markdown:
        say(as_markdown(header, body))
    else:
        say_table(header, body, empty="")


def _plot(grid: "Grid", found: "Sequence[tuple[Cell, RunReport | None, str]]", folder: Path, metric: str) -> None:
    """Of the cells that are averaged, the first stands for all."""
    from atoll.simulations.experiments.plots import NoMatplotlib, plots

    first: dict[object, RunReport] = {}
    for cell, report, _ in found:
        if report is not None:
            first.setdefault(cell.without(grid.sweep.over), report)
    try:
        plots(list(first.values()), folder, metric=metric)
    except NoMatplotlib as error:
        note(str(error))
        return
    one = " (of each row its first run)" if len(first) < len(found) else ""
    note(f"plots are in {folder}{one}")
