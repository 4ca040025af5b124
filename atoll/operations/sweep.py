"""Simulate every combination of a grid of settings, and compare the runs."""

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import chdir
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from atoll.ground.printable import count_of
from atoll.operations.faults import CommandError
from atoll.operations.load import load_user_task, note_unused
from atoll.operations.reporter import note
from atoll.operations.requests import SimulateRequest, SweepRequest
from atoll.operations.simulate import NO_COORDINATOR, check_simulation, load_simulation, run_simulation, with_drop_empty
from atoll.protocol.settings import ConfigError, or_faults
from atoll.simulations.experiments.bands import Repeats
from atoll.simulations.experiments.grid import Cell, Grid, read_grid
from atoll.simulations.experiments.plots import main_metric
from atoll.simulations.experiments.report import RESULT, NoReport, RunReport, read_run
from atoll.simulations.experiments.requested_metric import RequestedMetric
from atoll.simulations.experiments.sweep import (
    LOG,
    Progress,
    State,
    Watch,
    check_cells,
    first_of,
    is_finished,
    overrides,
)
from atoll.simulations.experiments.table import Objective, Row, chosen, compared, document_of, rows
from atoll.simulations.federation.config import SimulationFile
from atoll.simulations.federation.report import Json
from atoll.simulations.federation.seal import unseal
from atoll.task.array_task import ArrayTask
from atoll.task.task import Task

NOTES_MAX = 5
"""Most different notes on the cells' populations that are shown."""


@dataclass(frozen=True, slots=True)
class Asked:
    """The table that is requested of a sweep: metric, target, columns, axis."""

    metric: RequestedMetric | None
    """The metric; None: the first one that is no loss."""
    target: float | None
    columns: tuple[str, ...]
    by: str | None = None
    """The axis on which the runs are compared; None: none is requested."""


@dataclass(frozen=True, slots=True)
class Swept:
    """The cells of a sweep, with the reports on their runs and the table that compares them."""

    grid: Grid
    cells: Sequence[tuple[Cell, RunReport | None, str]]
    """Each cell with the report on its run, if there is one, and its state."""
    objective: Objective
    rows: Sequence[Row]

    @property
    def document(self) -> dict[str, Any]:
        """The table, as `--json` prints it."""
        return document_of(self.rows, self.objective)

    @property
    def drawn(self) -> list[Repeats]:
        """The curves to draw: the cells that the table averages are one, with its band."""
        groups: dict[tuple[tuple[str, str], ...], list[RunReport]] = {}
        for cell, report, _ in self.cells:
            if report is not None:
                groups.setdefault(cell.without(self.grid.sweep.over), []).append(report)
        return [Repeats(_name(varied, runs), tuple(runs)) for varied, runs in groups.items()]


def asked_of(
    grid: Grid, metric: str | None, target: float | None, columns: Sequence[str] | None, by: str | None = None
) -> Asked:
    """Return the requested table: from the options, and for options left out from the grid's file.

    Raises:
        ConfigError: an unknown column.
    """
    wanted = target if target is not None else grid.sweep.target
    return Asked(_wanted(metric, grid), wanted, chosen(columns or grid.sweep.columns, wanted, by), by)


def swept(grid: Grid, folder: Path, asked: Asked, states: Mapping[str, str]) -> Swept:
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
    found = list(_found(grid, folder, states))
    reports = [report for _, report, _ in found if report is not None]
    if not reports:
        raise CommandError(f"{folder}: no cell has a report yet; see log.txt in the folder of each cell")
    if asked.metric is not None:
        asked.metric.is_measured(reports, is_over=all(state == "finished" for _, _, state in found))
    metric = asked.metric.metric if asked.metric is not None else main_metric(reports)
    objective = compared(Objective(metric, asked.target, asked.by), reports)
    return Swept(grid, found, objective, rows(found, objective, asked.columns, grid.sweep.over))


def watching(grid: Grid, folder: Path, asked: Asked, show: Watch) -> Watch:
    """Return a callback for the progress of a sweep that shows it, and checks that the runs measure the metric."""
    wanted, seen = asked.metric, 0
    if wanted is None:
        return show

    def watch(progress: Progress) -> None:
        nonlocal wanted, seen
        show(progress)
        ended = sum(progress.rounds.values()) + progress.count("finished")
        if wanted is None or ended == seen:
            return
        seen = ended
        reports = [report for _, report, _ in _found(grid, folder, progress.states) if report is not None]
        if wanted.is_measured(reports, is_over=False):
            wanted = None

    return watch


def grid_of(request: SweepRequest) -> Grid:
    """Read the grid, and log the settings of its file for a coordinator's process, which simulated runs do not have.

    Raises:
        ConfigError: all mistakes in the file and the overrides.
    """
    grid = read_grid(request.grid_file, with_drop_empty(request.overrides, request.drop_empty))
    given = {key.removeprefix("coordinator."): value for key, value in grid.unused.items()}
    note_unused(given, str(request.grid_file), why=f"{NO_COORDINATOR}; `model.keep_versions` is a setting of the run")
    return grid


def _wanted(metric: str | None, grid: Grid) -> RequestedMetric | None:
    """Return the metric of --metric or of the grid's file; None: neither names one."""
    if metric is not None:
        return RequestedMetric(metric, "--metric")
    return None if grid.sweep.metric is None else RequestedMetric(grid.sweep.metric, "sweep.metric")


def _found(grid: Grid, folder: Path, states: Mapping[str, str]) -> Iterator[tuple[Cell, RunReport | None, str]]:
    for cell in grid.cells:
        place = folder / cell.folder
        state = states.get(cell.folder) or ("finished" if is_finished(place) else "unfinished")
        try:
            yield cell, read_run(place, cell.name), state
        except NoReport:
            yield cell, None, state


def unfinished(grid: Grid, folder: Path) -> list[Cell]:
    """Return the cells that have not finished."""
    return [cell for cell in grid.cells if not is_finished(folder / cell.folder)]


def check_grid(
    grid: Grid,
    cells: Sequence[Cell],
    asked_for: RequestedMetric | None,
    task: Task | ArrayTask | None = None,
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


def _task_of(grid: Grid) -> Task | ArrayTask:
    """Load the task, the same in all cells, by its path from the grid's folder."""
    with chdir(grid.folder):
        return load_user_task(_file_of(grid.cells[0]).task)


def _file_of(cell: Cell) -> SimulationFile:
    return load_simulation(SimulateRequest(what=cell.task, overrides=overrides(cell)))


def _try_cells(grid: Grid, cells: Sequence[Cell], task: Task | ArrayTask) -> None:
    """Check the cells as `atoll simulate --check` does, from the grid's folder; print the notes on populations.

    Raises:
        ConfigError: all mistakes of all cells.
    """
    notes: dict[str, list[str]] = {}

    def check(cell: Cell) -> None:
        try:
            for line in check_simulation(_file_of(cell), task):
                notes.setdefault(line, []).append(cell.name)
        except CommandError as error:
            raise ConfigError(error.faults) from error

    with chdir(grid.folder):
        check_cells(cells, check)
    for line, names in list(notes.items())[:NOTES_MAX]:
        note(f"{first_of(names)}: {line}" if len(names) < len(cells) else line)
    if (more := len(notes) - NOTES_MAX) > 0:
        note(f"and {count_of(more, 'note')} more, in the population.json of the cells")


def _name(varied: tuple[tuple[str, str], ...], runs: Sequence[RunReport]) -> str:
    """Return the name of a row in legends: the settings that are not averaged."""
    names = (f"{column.rpartition('.')[2]} {value}" for column, value in varied)
    return runs[0].name if len(runs) == 1 else ", ".join(names) or "all"


def run_cells_here(grid: Grid, out: Path, task: Task | ArrayTask, *, watch: Watch) -> Progress:
    """Run every cell that is not finished; a failed one stops no other, and its `log.txt` has the reason.

    Args:
        grid: the grid of the cells.
        out: the folder of their folders.
        task: the task of all cells.
        watch: a callback for the progress, at the end of each round and each cell.

    Raises:
        ConfigError: raised by `watch`; it ends the sweep.
    """
    states: dict[str, State] = {
        cell.folder: "finished" if is_finished(out / cell.folder) else "waiting" for cell in grid.cells
    }
    progress, ends = Progress(states), list[ConfigError]()
    for cell in [cell for cell in grid.cells if states[cell.folder] == "waiting"]:
        states[cell.folder] = "running"

        def on_round(line: Json, name: str = cell.folder) -> None:
            progress.rounds = {name: int(line["round"])}
            try:
                watch(progress)
            except ConfigError as error:
                ends.append(error)
                raise

        states[cell.folder] = _run_here(cell, out / cell.folder, task, on_round)
        if ends:
            raise ends[0]
        progress.rounds = {}
        watch(progress)
    return progress


def _run_here(cell: Cell, folder: Path, task: Task | ArrayTask, on_round: Callable[[Json], None]) -> State:
    folder.mkdir(parents=True, exist_ok=True)
    unseal(folder)
    (folder / RESULT).unlink(missing_ok=True)  # an earlier result would hide a failure of this run
    try:
        file = _file_of(cell)
        result = run_simulation(file, task, folder, on_round)
    except (CommandError, ConfigError) as error:
        with (folder / LOG).open("a", encoding="utf-8") as log:
            log.writelines(f"atoll: {fault}\n" for fault in error.faults)
        return "failed"
    return "finished" if result["state"] == "finished" else "failed"
