"""`atoll sweep`: simulate every combination of a grid of settings, and compare the runs in a table and plots."""

import sys
from collections.abc import Iterator, Mapping, Sequence
from contextlib import chdir
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from atoll.aggregation.printable import count_of
from atoll.cli import options
from atoll.cli.experiments.rows import By, Columns, Csv, Markdown, check_formats, document_of, draw, say_rows
from atoll.cli.faults import CommandError
from atoll.cli.printing import as_json, note
from atoll.cli.printing import table as say_table
from atoll.cli.stopping import INTERRUPTED, if_stopped
from atoll.protocol.signals import handled_by

if TYPE_CHECKING:
    from atoll.parallel.task.array_task import ArrayTask
    from atoll.parallel.task.task import Task
    from atoll.simulations.experiments.bands import Repeats
    from atoll.simulations.experiments.grid import Cell, Grid
    from atoll.simulations.experiments.report import RunReport
    from atoll.simulations.experiments.requested_metric import RequestedMetric
    from atoll.simulations.experiments.sweep import Progress, Watch
    from atoll.simulations.experiments.table import Objective, Row

NOTES_MAX = 5
"""Most different notes on the populations of the cells that are printed."""

What = Annotated[
    Path, typer.Argument(metavar="GRID", help="A run's TOML with a table \\[grid]; docs/experiments.md has an example.")
]
Out = Annotated[
    Path | None, typer.Option("--out", metavar="DIR", help="The folder of all cells; by default atoll-sweep-NAME.")
]
Jobs = Annotated[
    int | None,
    typer.Option(
        "--jobs", metavar="N", callback=options.between(1), help="Number of runs at a time; by default sweep.jobs."
    ),
]
Metric = Annotated[
    str | None,
    typer.Option(
        "--metric",
        metavar="GROUP/NAME",
        help="The metric of the table, such as server/accuracy; by default sweep.metric.",
    ),
]
Target = Annotated[
    float | None,
    typer.Option("--target", metavar="X", help="Value of the metric to reach; by default sweep.target."),
]
Show = Annotated[bool, typer.Option("--show", help="Run nothing; show the results so far.")]
Check = Annotated[
    bool, typer.Option("--check", help="Run nothing; check every cell as `atoll simulate --check`, and list the cells.")
]
Plot = Annotated[bool, typer.Option("--plot/--no-plot", help="Draw PNG files into DIR/plots.")]


def sweep(
    grid_file: What,
    out: Out = None,
    jobs: Jobs = None,
    metric: Metric = None,
    target: Target = None,
    columns: Columns = None,
    by: By = None,
    drop_empty: options.DropEmpty = False,
    overrides: options.Set = [],  # noqa: B006 - typer's way to say "none given"; never changed
    show: Show = False,
    check: Check = False,
    markdown: Markdown = False,
    csv: Csv = False,
    plot: Plot = True,
    json: options.Json = False,
) -> None:
    """Simulate every combination of a grid of settings, several at a time, and compare them in a table and in plots.

    The same command completes an interrupted sweep: finished cells are not run again, interrupted ones resume. Exit
    code 1: a cell has failed; 130: Ctrl-C or SIGTERM.
    """
    if_stopped("before a cell began; nothing was written")
    from atoll.cli.files import overriding
    from atoll.simulations.experiments.grid import read_grid
    from atoll.simulations.experiments.sweep import Progress

    check_formats(by, markdown=markdown, csv=csv, json=json)

    grid = read_grid(grid_file, overriding(overrides, population__drop_empty=drop_empty or None))
    note_unused_of(grid, grid_file)
    folder = out or Path(f"atoll-sweep-{grid_file.stem}")
    asked = asked_of(grid, metric, target, columns.split(",") if columns else None, by)
    if not show:
        check_grid(grid, grid.cells if check else unfinished(grid, folder), asked.metric)
    elif asked.metric is not None:
        asked.metric.check_name()
    if check:
        _say_cells(grid, json)
        return
    progress = Progress() if show else _run(grid, folder, jobs or grid.sweep.jobs, asked)
    found = swept(grid, folder, asked, progress.states)
    say_rows(found.rows, found.objective, markdown=markdown, csv=csv, json=json)
    if plot:
        draw(found.drawn, folder / "plots", found.objective)
    if "failed" in progress.states.values():
        raise typer.Exit(1)


@dataclass(frozen=True, slots=True)
class Asked:
    """The table that a sweep is asked for."""

    metric: "RequestedMetric | None"
    """The metric; None: the first one that is no loss."""
    target: float | None
    columns: tuple[str, ...]
    by: str | None = None
    """The axis on which the runs are compared; None: none is asked for."""


@dataclass(frozen=True, slots=True)
class Swept:
    """The cells of a sweep, with the reports on their runs and the table that compares them."""

    grid: "Grid"
    cells: "Sequence[tuple[Cell, RunReport | None, str]]"
    """Each cell with the report on its run, if there is one, and its state."""
    objective: "Objective"
    rows: "Sequence[Row]"

    @property
    def document(self) -> dict[str, Any]:
        """The table, as `--json` prints it."""

        return document_of(self.rows, self.objective)

    @property
    def drawn(self) -> "list[Repeats]":
        """The curves to draw: the cells that the table averages are one, with its band."""
        from atoll.simulations.experiments.bands import Repeats

        groups: dict[tuple[tuple[str, str], ...], list[RunReport]] = {}
        for cell, report, _ in self.cells:
            if report is not None:
                groups.setdefault(cell.without(self.grid.sweep.over), []).append(report)
        return [Repeats(_name(varied, runs), tuple(runs)) for varied, runs in groups.items()]


def asked_of(
    grid: "Grid", metric: str | None, target: float | None, columns: Sequence[str] | None, by: str | None = None
) -> Asked:
    """Return the table that is asked for, where the grid's file names what the options leave out.

    Raises:
        ConfigError: an unknown column.
    """
    from atoll.simulations.experiments.table import chosen

    wanted = target if target is not None else grid.sweep.target
    return Asked(_wanted(metric, grid), wanted, chosen(columns or grid.sweep.columns, wanted, by), by)


def swept(grid: "Grid", folder: Path, asked: Asked, states: "Mapping[str, str]") -> Swept:
    """Read the runs of a sweep, and compare them.

    Args:
        grid: the grid of the cells.
        folder: the folder of the sweep.
        asked: the table.
        states: the states of the cells by their folders, as far as they were run just now.

    Raises:
        CommandError: no cell has a report.
        ConfigError: the runs do not measure the metric.
    """
    from atoll.simulations.experiments.plots import main_metric
    from atoll.simulations.experiments.table import Objective, compared, rows

    found = list(_found(grid, folder, states))
    reports = [report for _, report, _ in found if report is not None]
    if not reports:
        raise CommandError(f"{folder}: no cell has a report yet; see log.txt in the folder of each cell")
    if asked.metric is not None:
        asked.metric.is_measured(reports, is_over=all(state == "finished" for _, _, state in found))
    metric = asked.metric.metric if asked.metric is not None else main_metric(reports)
    objective = compared(Objective(metric, asked.target, asked.by), reports)
    return Swept(grid, found, objective, rows(found, objective, asked.columns, grid.sweep.over))


def watching(grid: "Grid", folder: Path, asked: Asked, show: "Watch") -> "Watch":
    """Return a callback for the progress of a sweep that shows it, and checks that the runs measure the metric."""
    from atoll.cli.experiments.sweep_progress import MetricWatch

    if asked.metric is None:
        return show

    def reports(progress: "Progress") -> "list[RunReport]":
        return [report for _, report, _ in _found(grid, folder, progress.states) if report is not None]

    metric_watch = MetricWatch(asked.metric, reports)

    def watch(progress: "Progress") -> None:
        show(progress)
        metric_watch.see(progress)

    return watch


def note_unused_of(grid: "Grid", grid_file: Path) -> None:
    """Note what the grid's file sets for a coordinator's process, which simulated runs do not have."""
    from atoll.cli.experiments.simulate import NO_COORDINATOR
    from atoll.cli.files import note_unused

    given = {key.removeprefix("coordinator."): value for key, value in grid.unused.items()}
    note_unused(given, str(grid_file), why=f"{NO_COORDINATOR}; `model.keep_versions` is of the run")


def _wanted(metric: str | None, grid: "Grid") -> "RequestedMetric | None":
    """Return the metric of --metric or of the grid's file; None: neither names one."""
    from atoll.simulations.experiments.requested_metric import RequestedMetric

    if metric is not None:
        return RequestedMetric(metric, "--metric")
    return None if grid.sweep.metric is None else RequestedMetric(grid.sweep.metric, "sweep.metric")


def _run(grid: "Grid", folder: Path, jobs: int, asked: Asked) -> "Progress":
    from atoll.cli.experiments.sweep_progress import SweepProgress
    from atoll.simulations.experiments.sweep import last_words, run_cells

    shown = SweepProgress(sys.stderr, note, grid, lambda name: last_words(folder / name))
    try:
        with handled_by(_interrupt):
            return run_cells(grid, folder, jobs=jobs, watch=watching(grid, folder, asked, shown.see))
    except KeyboardInterrupt:
        note("interrupted; the same command resumes it")
        raise typer.Exit(INTERRUPTED) from None
    finally:
        shown.close()
        if_stopped("")


def _interrupt(_number: int, _frame: object) -> None:
    """Raise what Ctrl-C raises, which ends the running cells first."""
    raise KeyboardInterrupt


def _found(grid: "Grid", folder: Path, states: "Mapping[str, str]") -> "Iterator[tuple[Cell, RunReport | None, str]]":
    from atoll.simulations.experiments.report import NoReport, read_run
    from atoll.simulations.experiments.sweep import is_finished

    for cell in grid.cells:
        place = folder / cell.folder
        state = states.get(cell.folder) or ("finished" if is_finished(place) else "unfinished")
        try:
            yield cell, read_run(place, cell.name), state
        except NoReport:
            yield cell, None, state


def unfinished(grid: "Grid", folder: Path) -> "list[Cell]":
    """Return the cells that have not finished."""
    from atoll.simulations.experiments.sweep import is_finished

    return [cell for cell in grid.cells if not is_finished(folder / cell.folder)]


def check_grid(
    grid: "Grid",
    cells: "Sequence[Cell]",
    asked_for: "RequestedMetric | None",
    task: "Task | ArrayTask | None" = None,
) -> None:
    """Check everything that can be checked before the first cell runs.

    Args:
        grid: the grid of the cells.
        cells: the cells to try with their task; the others have finished.
        asked_for: the metric; None: none is named.
        task: the task of all cells; None: it is loaded.

    Raises:
        ConfigError: all mistakes.
    """
    from atoll.protocol.settings import ConfigError, or_faults
    from atoll.simulations.experiments.sweep import check_cells

    faults: list[str] = []
    or_faults(lambda: check_cells(grid.cells), faults)
    if asked_for is not None:
        or_faults(asked_for.check_name, faults)
    if not faults and cells:
        loaded = _task_of(grid) if task is None else task
        or_faults(lambda: _try_cells(grid, cells, loaded), faults)
        if asked_for is not None:
            or_faults(lambda: asked_for.check_start(loaded, grid.cells), faults)
    if faults:
        raise ConfigError(faults)


def _task_of(grid: "Grid") -> "Task | ArrayTask":
    """Load the task, the same in all cells, by its path from the grid's folder."""
    from atoll.cli.experiments.simulate import load_simulation
    from atoll.cli.files import load_user_task
    from atoll.simulations.experiments.sweep import overrides

    with chdir(grid.folder):
        one = grid.cells[0]
        return load_user_task(load_simulation(one.task, overrides(one), rounds=None, clients=None).task)


def _try_cells(grid: "Grid", cells: "Sequence[Cell]", task: "Task | ArrayTask") -> None:
    """Check the cells as `atoll simulate --check` does, from the grid's folder; print the notes on populations.

    Raises:
        ConfigError: all mistakes of all cells.
    """
    from atoll.cli.experiments.simulate import load_simulation
    from atoll.cli.task_failures import task_failures_in_one_line
    from atoll.protocol.settings import ConfigError
    from atoll.simulations.experiments.sweep import check_cells, first_of, overrides
    from atoll.simulations.federation.setting import setting_of

    notes: dict[str, list[str]] = {}

    def check(cell: "Cell") -> None:
        try:
            file = load_simulation(cell.task, overrides(cell), rounds=None, clients=None)
            with task_failures_in_one_line():
                setting = setting_of(file, task)
            for line in setting.notes:
                notes.setdefault(line, []).append(cell.name)
        except CommandError as error:
            raise ConfigError(error.faults) from error

    with chdir(grid.folder):
        check_cells(cells, check)
    for line, names in list(notes.items())[:NOTES_MAX]:
        note(f"{first_of(names)}: {line}" if len(names) < len(cells) else line)
    if (more := len(notes) - NOTES_MAX) > 0:
        note(f"and {count_of(more, 'note')} more, in the population.json of the cells")


def _say_cells(grid: "Grid", json: bool) -> None:
    if json:
        as_json([{"folder": cell.folder, "task": cell.task, "settings": cell.settings} for cell in grid.cells])
        return
    say_table([*grid.columns, "folder"], [[*cell.varied.values(), cell.folder] for cell in grid.cells], empty="")


def _plot(
    grid: "Grid", found: "Sequence[tuple[Cell, RunReport | None, str]]", folder: Path, objective: "Objective"
) -> None:
    """Draw the plots, in which the cells that the table averages are one curve with its band."""


def _name(varied: tuple[tuple[str, str], ...], runs: "Sequence[RunReport]") -> str:
    """Return the name of a row in legends: the settings that are not averaged."""
    names = (f"{column.rpartition('.')[2]} {value}" for column, value in varied)
    return runs[0].name if len(runs) == 1 else ", ".join(names) or "all"
