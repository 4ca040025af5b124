"""Many small runs in a pool of processes, for runs of seconds, which take less time than the start of a process.

Like a sweep, it can be interrupted and resumed: a cell that has ended is not run again. Failure is an end, too: an
attack may drive the model out of the finite numbers, after which no update is accepted.
"""

import multiprocessing
import sys
from collections.abc import Callable, Iterable, Iterator, Mapping
from concurrent.futures import ProcessPoolExecutor, as_completed
from pathlib import Path
from typing import Any

from atoll.parallel.engine.orphans import end_with_the_parent
from atoll.simulations.experiments.grid import Cell
from atoll.simulations.experiments.report import RESULT, read_run
from atoll.simulations.experiments.sweep import overrides
from benchmarks.papers.goal import Goal


def run_cell(cell: Cell, folder: Path, goal: Goal | None = None) -> None:
    """Simulate a cell in this process, on one thread, until it has finished, failed or reached its goal.

    Raises:
        ConfigError: its settings are not valid.
        KeyboardInterrupt: it was interrupted.
    """
    import torch

    from atoll.protocol.settings import load_text, quoted
    from atoll.simulations.federation.config import SimulationFile
    from atoll.simulations.federation.run import opened
    from atoll.task.task import load_task

    def stop_at_goal(line: Mapping[str, Any]) -> None:
        if goal is not None and goal.is_met_by(line):
            federation.interrupt()

    torch.set_num_threads(1)
    file = load_text(SimulationFile, f"task = {quoted(cell.task)}", overrides(cell), name=cell.name)
    with opened(file, load_task(cell.task), folder, on_round=stop_at_goal, is_fresh=False) as federation:
        result = federation.run()
    if not is_over(folder, goal):
        raise KeyboardInterrupt(f"{cell.name}: {result['state']}")


def is_over(folder: Path, goal: Goal | None = None) -> bool:
    """Return whether the run in a folder has ended, or reached its goal."""
    if not (folder / RESULT).exists():
        return False
    report = read_run(folder)
    has_reached = goal is not None and any(goal.is_met_by(line) for line in report.rounds)
    return has_reached or report.result["state"] != "interrupted"


def run_all(
    cells: Iterable[Cell], out: Path, *, jobs: int, goal: Callable[[Cell], Goal | None] = lambda _: None
) -> Iterator[Cell]:
    """Simulate the cells that are not over, each in its folder under `out`, and yield each as it ends.

    Raises:
        Exception: the error of the first cell that failed.
    """
    waiting = [cell for cell in cells if not is_over(out / cell.folder, goal(cell))]
    if jobs == 1:
        for cell in waiting:
            run_cell(cell, out / cell.folder, goal(cell))
            yield cell
        return
    with ProcessPoolExecutor(jobs, multiprocessing.get_context("spawn"), end_with_the_parent) as pool:
        try:
            running = {pool.submit(run_cell, cell, out / cell.folder, goal(cell)): cell for cell in waiting}
            for done in as_completed(running):
                done.result()
                yield running[done]
        finally:
            pool.shutdown(cancel_futures=True)


def run_with_progress(
    cells: list[Cell], out: Path, *, jobs: int, goal: Callable[[Cell], Goal | None] = lambda _: None
) -> None:
    """Run all cells, each to its goal if it has one, and report progress on standard error."""
    done = sum(is_over(out / cell.folder, goal(cell)) for cell in cells)
    for cell in run_all(cells, out, jobs=jobs, goal=goal):
        done += 1
        sys.stderr.write(f"{done}/{len(cells)}  {cell.name}\n")
