"""`atoll.sweep`, and the runs that it returns."""

import shutil
import weakref
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, overload

from atoll.ground.printable import count_of
from atoll.interface.arguments import check_target, check_whole, folder_for
from atoll.interface.errors import AtollError, one_error
from atoll.interface.overrides import is_plain, overrides_of, plain_of
from atoll.interface.progress import Show, bar_of
from atoll.interface.simulated import SimulatedRun, in_this_process
from atoll.interface.tables import Table
from atoll.interface.tasks import IN_NO_FILE, Named, named, refuse_within_a_load
from atoll.interface.turns import in_turn
from atoll.operations.reporter import Reporter, reporting_to
from atoll.operations.requests import SweepRequest
from atoll.task.array_task import ArrayTask
from atoll.task.task import Task

if TYPE_CHECKING:
    import pandas

    from atoll.operations.sweep import Asked, Swept
    from atoll.simulations.experiments.grid import Cell, Grid
    from atoll.simulations.experiments.sweep import Progress


@one_error()
@in_turn()
def sweep(
    grid: Path | str | Mapping[str, Any],
    task: Task | ArrayTask | str | None = None,
    *,
    set: Mapping[str, Any] | None = None,
    jobs: int | None = None,
    metric: str | None = None,
    target: float | None = None,
    out: Path | str | None = None,
    progress: bool = True,
) -> "Sweep":
    """Simulate every combination of a grid of settings and compare the runs, as `atoll sweep` does.

    Args:
        grid: the TOML of a sweep; or its columns, such as `{"local.lr": [0.1, 0.3], "seed": [1, 2]}`; or all tables of
            the TOML as a mapping, with `grid` among them.
        task: the task, or its reference, of a mapping that names none. A task object is trained in this process, a cell
            after the other, unless `jobs` asks for several.
        set: settings of all cells.
        jobs: runs at a time, each in a separate process; None: `sweep.jobs`, which is 1.
        metric: the metric of the table, such as "server/accuracy"; None: `sweep.metric`, or the first that is no loss.
        target: the value of the metric to reach; None: `sweep.target`.
        out: the folder of the sweep, in which an interrupted one resumes and finished cells are not repeated; None: a
            temporary one, which lasts as long as the returned object.
        progress: show a progress bar, on a terminal or in a notebook.

    Raises:
        AtollError: grid, settings or task have faults, with all of them before anything runs; or no cell could run. A
            cell that fails stops no other: `Sweep.failures` has the reason.
    """
    from atoll.operations import sweep as operation

    if jobs is not None:
        check_whole("jobs", jobs, 1)
    check_target(target)
    refuse_within_a_load()
    notes: list[str] = []
    with reporting_to(Reporter(notes.append)):
        cells, of_call = _grid(grid, task, set)
        at_once = jobs or cells.sweep.jobs
        is_here = of_call is not None and at_once == 1
        _check_processes(cells, of_call, at_once)
        with folder_for(out) as folder:
            asked = operation.asked_of(cells, metric, target, None)
            loaded = None if of_call is None else of_call.task
            operation.check_grid(cells, operation.unfinished(cells, folder), asked.metric, loaded)
            with bar_of("cells", is_shown=progress) as bar:
                done = _run(_Order(cells, folder, at_once, asked), loaded if is_here else None, bar)
            return Sweep(
                operation.swept(cells, folder, asked, done.states), folder, notes, is_temporary=out is None, task=loaded
            )


@dataclass(frozen=True, slots=True)
class _Order:
    grid: "Grid"
    folder: Path
    jobs: int
    asked: "Asked"


def _run(order: _Order, task: Task | ArrayTask | None, bar: Show) -> "Progress":
    """Run the cells: of a task here, otherwise in processes of the operation."""
    from atoll.operations.sweep import run_cells_here, watching
    from atoll.simulations.experiments.sweep import run_cells

    def show(progress: "Progress") -> None:
        bar(progress.count("finished") + progress.count("failed"), len(progress.states))

    watch = watching(order.grid, order.folder, order.asked, show)
    if task is not None:
        return run_cells_here(order.grid, order.folder, task, watch=watch)
    return run_cells(order.grid, order.folder, jobs=order.jobs, watch=watch)


def _grid(
    grid: Path | str | Mapping[str, Any], task: Task | ArrayTask | str | None, settings: Mapping[str, Any] | None
) -> "tuple[Grid, Named | None]":
    """Return the cells, and the task with its reference, where it is an object."""
    import tomli_w

    from atoll.operations.sweep import grid_of
    from atoll.simulations.experiments.grid import parse_grid

    overrides = overrides_of(settings)
    if not isinstance(grid, Mapping | str | Path):
        raise AtollError(f"grid: got {grid!r}; allowed: the path of a sweep's TOML, or a dictionary of columns")
    if not isinstance(grid, Mapping):
        if task is not None:
            raise AtollError(f"task: {grid} names the task: leave it out, or give the grid as a mapping")
        return grid_of(SweepRequest(grid_file=Path(grid), overrides=overrides)), None
    document: dict[str, Any] = {**grid} if isinstance(grid.get("grid"), Mapping) else {"grid": grid}
    task = document.pop("task", None) if task is None else task
    if task is None:
        raise AtollError("task: missing; allowed: a task, or its reference")
    of_call = None if isinstance(task, str) else named(task)
    document = plain_of(document | {"task": task if of_call is None else of_call.reference})
    if faults := [f"{key}: got {value!r}" for key, value in _columns(document) if not is_plain(value)]:
        raise AtollError(*(f"grid: {fault}; allowed: numbers, strings, true, false, lists of them" for fault in faults))
    return parse_grid(tomli_w.dumps(document).encode(), Path("grid"), overrides), of_call


def _columns(document: Mapping[str, Any]) -> list[tuple[str, Any]]:
    """Return the columns of the grid and the other settings, with their values."""
    others = {key: value for key, value in document.items() if key != "grid"}
    return [*document["grid"].items(), *others.items()]


def _check_processes(grid: "Grid", of_call: Named | None, jobs: int) -> None:
    """Check that a sweep needs no other process, if its task is of a notebook's cell, which others cannot import.

    Raises:
        AtollError: several runs at a time, or an engine of several processes.
    """
    if of_call is None or not of_call.is_of_a_cell:
        return
    if jobs > 1:
        raise AtollError(f"jobs: got {jobs}; {IN_NO_FILE}, or leave jobs out")
    for cell in grid.cells:
        in_this_process(cell.settings)


class Sweep(Sequence[SimulatedRun]):
    """The runs of a sweep, a cell each in the order of the grid, and the table that compares them.

    `sweep[0]` is the run of the first cell.
    """

    def __init__(
        self,
        found: "Swept",
        folder: Path,
        notes: Sequence[str] = (),
        *,
        is_temporary: bool = False,
        task: Task | ArrayTask | None = None,
    ) -> None:
        self._found, self.folder, self.notes, self._task = found, folder, notes, task
        if is_temporary:
            weakref.finalize(self, shutil.rmtree, self.folder, ignore_errors=True)

    @property
    def metric(self) -> str:
        """The metric of the table."""
        return self._found.objective.metric

    @property
    def rows(self) -> Table:
        """The table of the command: varied settings, and each column's mean over cells that differ in the seed alone.

        Of several cells it also has `COLUMN.std` (of n - 1) and `COLUMN.n`, the number of cells that have a value.
        """
        return self._table(self._found)

    def table(self, *columns: str, target: float | None = None) -> Table:
        """Return the table with other columns, such as "rounds_to_target", or with another target.

        Args:
            columns: names of columns; without one, the default ones.
            target: the value of the metric to reach; None: as before.

        Raises:
            AtollError: a column is unknown, or needs a target.
        """
        from atoll.operations.sweep import asked_of, swept

        check_target(target)
        with one_error():
            wanted = self._found.objective.target if target is None else target
            asked = asked_of(self._found.grid, self.metric, wanted, columns)
            states = {cell.folder: state for cell, _, state in self._found.cells if state == "failed"}
            return self._table(swept(self._found.grid, self.folder, asked, states))

    def _table(self, found: "Swept") -> Table:
        values = self._values
        table = []
        for row in found.rows:
            line = {column: values.get((column, label), label) for column, label in row.varied.items()}
            for name, mean in row.values.items():
                line[name] = mean.mean
                line |= {f"{name}.std": mean.std, f"{name}.n": mean.n} if mean.of > 1 else {}
            table.append(line | {"state": row.state})
        return Table(table)

    @property
    def cells(self) -> Table:
        """The cells, a row each: varied settings, state, digest of the model, folder."""
        values = self._values
        return Table(
            [
                {column: values.get((column, label), label) for column, label in cell.varied.items()}
                | {
                    "state": state,
                    "digest": "" if report is None else report.result.get("model_digest", ""),
                    "folder": cell.folder,
                }
                for cell, report, state in self._found.cells
            ]
        )

    @property
    def failures(self) -> Mapping[str, str]:
        """The reasons of the cells that have failed, by their names."""
        from atoll.simulations.experiments.sweep import last_words

        return {
            cell.name: last_words(self.folder / cell.folder).removeprefix("atoll: ")
            for cell, _, state in self._found.cells
            if state == "failed"
        }

    @property
    def document(self) -> Mapping[str, Any]:
        """The table in JSON types, as `atoll sweep --json`."""
        from atoll.protocol.json_values import plain

        found: Mapping[str, Any] = plain(self._found.document)
        return found

    def frame(self) -> "pandas.DataFrame":
        """Return `rows` as a data frame of pandas."""
        return self.rows.frame()

    def plot(self, metric: str | None = None) -> Any:
        """Return a figure of matplotlib with a metric over the rounds, a curve for each row of the table.

        Args:
            metric: `accuracy`, or with its group `server/accuracy`; None: the table's.

        Raises:
            AtollError: matplotlib is not installed, or no run has measured it.
        """
        from atoll.interface.figures import curves

        return curves(self._found.drawn, metric or self.metric)

    @property
    def _values(self) -> dict[tuple[str, str], Any]:
        """The values of the varied settings by column and label; a group of settings has its label alone."""
        return {
            (column, label): cell.settings[column]
            for cell, _, _ in self._found.cells
            for column, label in cell.varied.items()
            if column in cell.settings
        }

    def _run(self, cell: "Cell") -> SimulatedRun:
        return SimulatedRun(self.folder / cell.folder, task=self._task, owner=self)

    @overload
    def __getitem__(self, index: int) -> SimulatedRun: ...
    @overload
    def __getitem__(self, index: slice) -> list[SimulatedRun]: ...
    def __getitem__(self, index: int | slice) -> SimulatedRun | list[SimulatedRun]:
        """Return the run of a cell, or the runs of several cells."""
        cells = [cell for cell, _, _ in self._found.cells]
        return [*map(self._run, cells[index])] if isinstance(index, slice) else self._run(cells[index])

    def __len__(self) -> int:
        """Return the number of cells."""
        return len(self._found.cells)

    def __repr__(self) -> str:
        return f"Sweep({count_of(len(self), 'cell')}, {self.metric}, {str(self.folder)!r})"

    def _repr_html_(self) -> str:
        return f"<p>{self.metric}</p>{self.rows._repr_html_()}"
