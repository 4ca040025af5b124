"""The execution of a sweep: the cells of a grid, several in parallel, each in a separate process and folder.

    OUT/CELL/          the files of `atoll simulate --out`
    OUT/CELL/log.txt   the output of the process

A cell whose result is "finished" is not run again. Every other cell is started in its folder, where an interrupted run
resumes from its last saved round, so that the same command completes an interrupted sweep.
"""

import json
import os
import subprocess
import sys
import time
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Literal

from atoll.protocol.settings import ConfigError, load_text, quoted
from atoll.simulations.experiments.grid import Cell, Grid
from atoll.simulations.experiments.lifeline import VARIABLE, lifeline
from atoll.simulations.experiments.report import RESULT, ROUNDS
from atoll.simulations.federation.report import REASONS
from atoll.simulations.federation.seal import faults_of_seal, unseal
from atoll.simulations.populations.opened_files import SHARED

State = Literal["waiting", "running", "finished", "failed"]
Command = Callable[[Cell, Path], Sequence[str]]
"""Function from a cell and its folder to the command that runs it."""

LOG = "log.txt"
POLL_S = 0.1
END_S = 10.0
"""Seconds between the request to end and the killing of a run, which then loses its open round."""


@dataclass(slots=True)
class Progress:
    """Progress of a sweep."""

    states: dict[str, State] = field(default_factory=dict)
    """States of the cells by their folders, in the order of the grid."""
    rounds: dict[str, int] = field(default_factory=dict)
    """Numbers of ended rounds of the running cells, by their folders."""

    def count(self, state: State) -> int:
        """Return the number of cells in a state."""
        return sum(one == state for one in self.states.values())


Watch = Callable[[Progress], None]


def simulate(cell: Cell, folder: Path) -> list[str]:
    """Return the command `atoll simulate` with the cell's settings."""
    settings = [f"--set={setting}" for setting in overrides(cell)]
    return [sys.executable, "-m", "atoll", "simulate", cell.task, "--out", str(folder), *settings]


def overrides(cell: Cell) -> list[str]:
    """Return the cell's settings in the form of `--set`."""
    return [f"{key}={json.dumps(value, ensure_ascii=False)}" for key, value in cell.settings.items()]


def check_settings(cell: Cell) -> None:
    """Check the cell's settings, without its task; raise ConfigError if a simulation does not have them."""
    from atoll.simulations.federation.config import SimulationFile

    load_text(SimulationFile, f"task = {quoted(cell.task)}", overrides(cell), name="")


def check_cells(cells: Iterable[Cell], check: Callable[[Cell], None] = check_settings) -> None:
    """Check that every cell can be run, before the first of them runs for an hour.

    Args:
        cells: the cells.
        check: checks one cell; it raises ConfigError.

    Raises:
        ConfigError: each fault once, with the first cell that has it and the number of other cells.
    """
    faults: dict[str, list[str]] = {}
    for cell in cells:
        try:
            check(cell)
        except ConfigError as error:
            for fault in error.faults:
                faults.setdefault(fault.removeprefix("--set: "), []).append(cell.name)
    if faults:
        raise ConfigError([f"{first_of(names)}: {fault}" for fault, names in faults.items()])


def first_of(names: Sequence[str]) -> str:
    """Return the name of the first of several cells, with the number of the others."""
    others = len(names) - 1
    return names[0] if not others else f"{names[0]} and {others} more cell{'s' if others > 1 else ''}"


def run_cells(
    grid: Grid, out: Path, *, jobs: int = 1, command: Command | None = None, watch: Watch = lambda _: None
) -> Progress:
    """Run every cell that is not finished.

    Args:
        grid: the grid of the cells.
        out: the parent of their folders.
        jobs: the number of parallel runs, which share the cores.
        command: returns the command of a cell, which runs in the grid's folder; None: `simulate`.
        watch: a callback for the progress, about ten times a second.

    Returns:
        The finished cells, and the failed ones: with an exit code other than 0, or without a result.

    Raises:
        KeyboardInterrupt: after every running cell has ended; the next call resumes.
    """
    out = out.resolve()
    progress = Progress(
        {cell.folder: "finished" if is_finished(out / cell.folder) else "waiting" for cell in grid.cells}
    )
    waiting = [cell for cell in grid.cells if progress.states[cell.folder] == "waiting"]
    running: dict[str, subprocess.Popen[bytes]] = {}
    with lifeline() as life:
        try:
            while waiting or running:
                while waiting and len(running) < jobs:
                    cell = waiting.pop(0)
                    line = (command or simulate)(cell, out / cell.folder)
                    running[cell.folder] = _start(line, out / cell.folder, grid.folder, jobs, life)
                    progress.states[cell.folder] = "running"
                for name in [name for name, process in running.items() if process.poll() is not None]:
                    is_well = running.pop(name).returncode == 0 and is_finished(out / name)
                    progress.states[name] = "finished" if is_well else "failed"
                progress.rounds = {name: _rounds(out / name) for name in running}
                watch(progress)
                if running:
                    time.sleep(POLL_S)
        finally:
            _end(running.values())
    return progress


def is_finished(folder: Path) -> bool:
    """Return whether the run in a folder has finished, and its files are unchanged since."""
    try:
        result = json.loads((folder / RESULT).read_text("utf-8"))
    except (OSError, ValueError):
        return False
    return isinstance(result, Mapping) and result.get("state") == "finished" and not faults_of_seal(folder)


def last_words(folder: Path) -> str:
    """Return the reason why a cell failed: its run's cause and its clients' failures, or the last line of its log."""
    try:
        result = json.loads((folder / RESULT).read_text("utf-8"))
        *_, last = (json.loads(line) for line in (folder / ROUNDS).read_text("utf-8").splitlines())
        reasons = {reason for key in REASONS for reason in last.get(key, {}).values()}
        why = "; ".join(filter(None, [result["cause"], *sorted(reasons)]))
    except (OSError, ValueError, KeyError):
        why = ""
    return why or _last_line(folder / LOG)


def _last_line(log: Path) -> str:
    try:
        lines = log.read_text("utf-8", errors="replace").split("\n")
    except OSError:
        return "no output"
    return next((line.strip() for line in reversed(lines) if line.strip()), "no output")


def _start(command: Sequence[str], folder: Path, working: Path, jobs: int, life: int) -> "subprocess.Popen[bytes]":
    """Start a cell in a separate session, so that Ctrl-C reaches it only through the sweep."""
    folder.mkdir(parents=True, exist_ok=True)
    unseal(folder)
    (folder / RESULT).unlink(missing_ok=True)  # an earlier result would hide a failure of this run
    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    environment = {
        "OMP_NUM_THREADS": str(max(1, cores // jobs)),
        **os.environ,
        VARIABLE: "1",
        SHARED: str(folder.parent),
    }
    with (folder / LOG).open("ab") as log:
        return subprocess.Popen(
            command,
            cwd=working,
            env=environment,
            stdin=life,
            stdout=log,
            stderr=log,
            start_new_session=True,
        )


def _end(left: "Collection[subprocess.Popen[bytes]]") -> None:
    for process in left:
        process.terminate()
    deadline = time.monotonic() + END_S
    for process in left:
        with suppress(subprocess.TimeoutExpired):
            process.wait(max(0.0, deadline - time.monotonic()))
            continue
        process.kill()
        process.wait()


def _rounds(folder: Path) -> int:
    try:
        return (folder / ROUNDS).read_bytes().count(b"\n")
    except OSError:
        return 0
