"""Runs the cells of a grid, several at once, each a process with a folder of its own.

    OUT/CELL/          what `atoll simulate --out` leaves
    OUT/CELL/log.txt   what the process said

A cell whose result says "finished" is not run again; every other one is started anew in its folder, where an
interrupted run goes on from its last committed round. So the same command finishes a sweep that was cut off.
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

from atoll.protocol.settings import ConfigError, load_text
from atoll.simulations.experiments.grid import Cell, Grid
from atoll.simulations.experiments.lifeline import VARIABLE, lifeline
from atoll.simulations.experiments.report import RESULT, ROUNDS

State = Literal["waiting", "running", "finished", "failed"]
Command = Callable[[Cell, Path], Sequence[str]]
"""(cell, its folder) -> what to execute."""

LOG = "log.txt"
POLL_S = 0.1
END_S = 10.0
"""A run that is told to end has so long, then it is killed; it loses the round that is open."""


@dataclass(slots=True)
class Progress:
    """Where a sweep is."""

    states: dict[str, State] = field(default_factory=dict)
    """By the cell's folder, in the order of the grid."""
    rounds: dict[str, int] = field(default_factory=dict)
    """Of the running ones: rounds that have ended."""

    def count(self, state: State) -> int:
        """How many are in that state."""
        return sum(one == state for one in self.states.values())


Watch = Callable[[Progress], None]


def simulate(cell: Cell, folder: Path) -> list[str]:
    """`atoll simulate` with the cell's settings."""
    settings = [f"--set={setting}" for setting in overrides(cell)]
    return [sys.executable, "-m", "atoll", "simulate", cell.task, "--out", str(folder), *settings]


def overrides(cell: Cell) -> list[str]:
    """The cell's settings as `--set` takes them."""
    return [f"{key}={json.dumps(value, ensure_ascii=False)}" for key, value in cell.settings.items()]


def check_settings(cell: Cell) -> None:
    """Raises ConfigError when the cell's settings are none of a simulation, whatever its task is."""
    from atoll.simulations.federation.config import SimulationFile

    load_text(SimulationFile, f"task = {json.dumps(cell.task)}", overrides(cell), name="")


def check_cells(cells: Iterable[Cell], check: Callable[[Cell], None] = check_settings) -> None:
    """Insist that every cell can be run, before the first of them runs for an hour.

    Args:
        cells: to look at.
        check: raises ConfigError for one that cannot.

    Raises:
        ConfigError: each fault once, with the first cell that has it and how many more do.
    """
    faults: dict[str, list[str]] = {}
    for cell in cells:
        try:
            check(cell)
        except ConfigError as error:
            for fault in error.faults:
                faults.setdefault(fault.removeprefix("--set: "), []).append(cell.name)
    if faults:
        more = {fault: f" and {len(names) - 1} cells more" * (len(names) > 1) for fault, names in faults.items()}
        raise ConfigError([f"{names[0]}{more[fault]}: {fault}" for fault, names in faults.items()])


def run_cells(
    grid: Grid, out: Path, *, jobs: int = 1, command: Command | None = None, watch: Watch = lambda _: None
) -> Progress:
    """Run every cell that is not finished.

    Args:
        grid: of the cells.
        out: where their folders are.
        jobs: how many at once; they share the cores.
        command: how a cell is run, from the grid's folder; None: `simulate`.
        watch: is told about ten times a second.

    Returns:
        Which cells are finished, and which failed: these end with another code than 0, or without a result.

    Raises:
        KeyboardInterrupt: after every running cell has ended; the next call goes on.
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
    """Whether the run in a folder has come to its end."""
    try:
        result = json.loads((folder / RESULT).read_text("utf-8"))
    except (OSError, ValueError):
        return False
    return isinstance(result, Mapping) and result.get("state") == "finished"


def last_words(folder: Path) -> str:
    """Why a cell has failed: what its run ended with, and why clients failed; else the last line that it said."""
    try:
        result = json.loads((folder / RESULT).read_text("utf-8"))
        *_, last = (json.loads(line) for line in (folder / ROUNDS).read_text("utf-8").splitlines())
        why = "; ".join(filter(None, [result["cause"], *sorted(set(last.get("failures", {}).values()))]))
    except (OSError, ValueError, KeyError):
        why = ""
    return why or _last_line(folder / LOG)


def _last_line(log: Path) -> str:
    try:
        lines = log.read_text("utf-8", errors="replace").split("\n")
    except OSError:
        return "it said nothing"
    return next((line.strip() for line in reversed(lines) if line.strip()), "it said nothing")


def _start(command: Sequence[str], folder: Path, working: Path, jobs: int, life: int) -> "subprocess.Popen[bytes]":
    """In a session of its own, so that Ctrl-C reaches it through us alone; it ends when we are gone."""
    folder.mkdir(parents=True, exist_ok=True)
    (folder / RESULT).unlink(missing_ok=True)  # of an earlier try: this one may fail otherwise
    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    environment = {"OMP_NUM_THREADS": str(max(1, cores // jobs)), **os.environ, VARIABLE: "1"}
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
