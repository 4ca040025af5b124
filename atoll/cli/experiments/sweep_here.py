"""The cells of a sweep in this process, one after another: for a task that no other process can import."""

from collections.abc import Callable
from pathlib import Path

from atoll.cli.experiments.simulate import load_simulation, run_simulation
from atoll.cli.faults import CommandError
from atoll.parallel.task.array_task import ArrayTask
from atoll.parallel.task.task import Task
from atoll.protocol.settings import ConfigError
from atoll.simulations.experiments.grid import Cell, Grid
from atoll.simulations.experiments.report import RESULT
from atoll.simulations.experiments.sweep import LOG, Progress, State, Watch, is_finished, overrides
from atoll.simulations.federation.report import Json
from atoll.simulations.federation.seal import unseal


def run_cells_here(grid: Grid, out: Path, task: Task | ArrayTask, *, watch: Watch) -> Progress:
    """Run every cell that is not finished; a failed one stops no other, and its `log.txt` has the reason.

    Args:
        grid: the grid of the cells.
        out: the folder of their folders.
        task: the task of all cells.
        watch: a callback for the progress, at the end of each round and each cell.

    Raises:
        ConfigError: of `watch`, which ends the sweep.
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

        states[cell.folder] = _run(cell, out / cell.folder, task, on_round)
        if ends:
            raise ends[0]
        progress.rounds = {}
        watch(progress)
    return progress


def _run(cell: Cell, folder: Path, task: Task | ArrayTask, on_round: Callable[[Json], None]) -> State:
    folder.mkdir(parents=True, exist_ok=True)
    unseal(folder)
    (folder / RESULT).unlink(missing_ok=True)  # an earlier result would hide a failure of this run
    try:
        file = load_simulation(cell.task, overrides(cell), rounds=None, clients=None)
        result = run_simulation(file, task, folder, on_round)
    except (CommandError, ConfigError) as error:
        with (folder / LOG).open("a", encoding="utf-8") as log:
            log.writelines(f"atoll: {fault}\n" for fault in error.faults)
        return "failed"
    return "finished" if result["state"] == "finished" else "failed"
