"""Seconds that people feel: ten commands beside a bare `import torch`, and beside Flower.

    python -m benchmarks.startup [--passes N] [--quick]

In each pass every command runs once, and `import torch` first and last, so that all of them see the same machine. A
ratio is a command's time over that of the imports of its pass; the median of the passes counts. Wall seconds are what
people feel; on a machine with other work the processor seconds of a command and its children say more, so the bars are
in them where the imports took much longer than their processor time. A coordinator is measured until it listens, with
the worker process that makes version 0 of the model. Flower: `flwr --help`, and `flwr run` to the end of the first
round of the same task with three clients, whose SuperLink and SuperNodes run already.
"""

import argparse
import os
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from statistics import mean, median
from typing import Any

from atoll.protocol.identity.names import Identity, Role
from atoll.protocol.vocabulary import RunState
from atoll.server.views.history import History
from benchmarks.flower_peer import PEERS, QUIET, Flower, check_installed
from benchmarks.members import equip
from benchmarks.processes import (
    ATOLL,
    NotMeasured,
    Processes,
    Usage,
    agent_command,
    coordinator_command,
    keep_bytecode,
    wait_for_address,
)
from benchmarks.report import Bar, conclude, say, spread

IMPORT = "import torch"
SITES = ("north", "south", "east")
BARS: Mapping[str, float] = {
    "run list": 0.3,
    "run show": 0.3,
    "round show": 0.3,
    "client list": 0.3,
    "settings": 0.3,
    "model list": 0.3,
    "coordinator": 1.3,
    "simulate": 1.8,
    "train": 1.8,
}
"""The bars, in imports of torch."""

BUSY = 1.3
"""The wall time of an import over its processor time from which on the machine counts as busy."""

LIMIT_S = 300.0


@dataclass(frozen=True, slots=True)
class Times:
    """The seconds of a command: by the clock, and of processors, its children's included."""

    wall_s: float
    cpu_s: float


@dataclass
class Subject:
    """A command with its times, one for each pass."""

    measure: Callable[[], Times]
    times: list[Times] = field(default_factory=list)

    def summary(self, imports: Sequence[Times]) -> dict[str, Any]:
        """Return its times, and its ratios to the imports of the same passes."""
        wall = [ours.wall_s / bare.wall_s for ours, bare in zip(self.times, imports, strict=True)]
        cpu = [ours.cpu_s / bare.cpu_s for ours, bare in zip(self.times, imports, strict=True)]
        return {
            "wall_s": spread([each.wall_s for each in self.times]),
            "cpu_s": spread([each.cpu_s for each in self.times]),
            "wall_in_imports": round(median(wall), 3),
            "cpu_in_imports": round(median(cpu), 3),
        }


def finished(command: Sequence[str], folder: Path, *, without: Path | None = None) -> Times:
    """Return the times of a command that ends by itself, after a path that it makes was removed.

    Raises:
        NotMeasured: it failed.
    """
    if without is not None:
        shutil.rmtree(without, ignore_errors=True)
    with tempfile.TemporaryFile() as log:
        begun = time.perf_counter()
        process = subprocess.Popen(command, cwd=folder, stdin=subprocess.DEVNULL, stdout=log, stderr=log)
        _, status, used = os.wait4(process.pid, 0)
        wall = time.perf_counter() - begun
        process.returncode = os.waitstatus_to_exitcode(status)
        if process.returncode:
            log.seek(0)
            raise NotMeasured(f"{' '.join(command)}: {log.read().decode(errors='replace')[-2000:]}")
    return Times(wall, used.ru_utime + used.ru_stime)


def listening(folder: Path) -> Times:
    """Return the times of a coordinator in a new state directory until it says that it listens.

    Raises:
        NotMeasured: it ends before.
    """
    state = folder / "new-state"
    shutil.rmtree(state, ignore_errors=True)
    command = coordinator_command(
        "run.toml", coordinator__listen="127.0.0.1:0", coordinator__admin="127.0.0.1:0", coordinator__state=state
    )
    begun = time.perf_counter()
    with subprocess.Popen(command, cwd=folder, stdin=subprocess.DEVNULL, stderr=subprocess.PIPE, text=True) as process:
        assert process.stderr is not None
        try:
            if not any("atoll coordinator on" in line for line in process.stderr):
                raise NotMeasured("the coordinator ended before it listened")
            wall = time.perf_counter() - begun
            return Times(wall, sum(Usage.of(pid).cpu_s for pid in _family(process.pid)))
        finally:
            process.terminate()
            process.stderr.read()


def _family(pid: int) -> Iterator[int]:
    """Yield a process and its descendants that live."""
    yield pid
    for task in Path(f"/proc/{pid}/task").iterdir():
        for child in (task / "children").read_text().split():
            yield from _family(int(child))


def prepare(place: Path) -> Path:
    """Return a folder with the task of `atoll new` and the state of a finished run of three sites."""
    folder = place / "digits"
    subprocess.run([ATOLL, "new", str(folder)], check=True, stdout=subprocess.DEVNULL)
    state, task = folder / "atoll-state", f"{folder / 'task.py'}:task"
    with Processes(place) as processes:
        settings = {"coordinator__listen": "127.0.0.1:0", "coordinator__admin": "127.0.0.1:0"}
        command = coordinator_command(str(folder / "run.toml"), **settings, coordinator__state=state)
        processes.start("coordinator", command)
        address = wait_for_address(processes, "coordinator", state)
        for site in SITES:
            equip(state, place / site, Identity(Role.CLIENT, site))
            processes.start(site, agent_command(task, site=site, coordinator=address, state=place / site))
        history, until = History(state), time.monotonic() + LIMIT_S
        while history.run("digits-1").state is not RunState.FINISHED:
            if time.monotonic() > until:
                raise NotMeasured(f"no end of the run:\n{processes.last_words('coordinator')}")
            time.sleep(0.1)
        processes.running["coordinator"].wait(LIMIT_S)
    return folder


def subjects_of(folder: Path) -> dict[str, Subject]:
    """Return the ten commands; all but the coordinator end by themselves."""
    plain = ("--help", "run list", "run show digits-1", "round show 5", "client list", "settings", "model list")
    commands = {
        " ".join(text.split()[:2]): Subject(partial(finished, [ATOLL, *text.split()], folder)) for text in plain
    }
    example = "simulate task.py:task --clients 100 --rounds 10 --set round.cohort_size=20 --set local.lr=0.5 --out sim"
    training = "train task.py:task --epochs 1 --out training"
    return {
        **commands,
        "coordinator": Subject(partial(listening, folder)),
        "simulate": Subject(partial(finished, [ATOLL, *example.split()], folder, without=folder / "sim")),
        "train": Subject(partial(finished, [ATOLL, *training.split()], folder, without=folder / "training")),
    }


def measure(folder: Path, passes: int) -> tuple[dict[str, Subject], list[Times]]:
    """Return the commands with their times, and the times of the imports, the mean of the first and the last of a pass.

    A first run of each command, which compiles modules and fills the page cache, does not count.
    """
    bare = partial(finished, [sys.executable, "-c", IMPORT], folder)
    subjects, imports = subjects_of(folder), list[Times]()
    for number in range(passes + 1):
        before, found = bare(), {name: subject.measure() for name, subject in subjects.items()}
        after = bare()
        if not number:
            continue
        both = Times(mean((before.wall_s, after.wall_s)), mean((before.cpu_s, after.cpu_s)))
        imports.append(both)
        for name, times in found.items():
            subjects[name].times.append(times)
        say(f"pass {number}: {IMPORT} {both.wall_s:.2f} s ({both.cpu_s:.2f} s of processor); " + _listed(found, both))
    return subjects, imports


def _listed(found: Mapping[str, Times], bare: Times) -> str:
    return ", ".join(
        f"{name} {each.wall_s / bare.wall_s:.2f} ({each.cpu_s / bare.cpu_s:.2f})" for name, each in found.items()
    )


def flower(folder: Path, passes: int) -> dict[str, Any]:
    """Return the times of `flwr --help`, and from `flwr run` to the end of the first round."""
    check_installed()
    os.environ |= QUIET
    helps = [finished([str(PEERS / "flwr"), "--help"], folder) for _ in range(passes + 1)][1:]
    firsts = []
    for _ in range(passes):
        with tempfile.TemporaryDirectory(prefix="atoll-bench-") as place, Processes(Path(place)) as processes:
            settings = {"ATOLL_BENCH_DIGITS": str(folder / "digits.csv.gz")}
            side = Flower(processes, len(SITES), 0, settings, module="startup_flower_app")
            side.run(1, LIMIT_S)
            firsts.append(side.rows[0]["ended_at"] - side.asked_at)
    return {
        "flwr --help": {key: spread([getattr(each, key) for each in helps]) for key in ("wall_s", "cpu_s")},
        "flwr run to the end of the first round": {"wall_s": spread(firsts)},
    }


def bars_of(ours: Mapping[str, Mapping[str, Any]], imports: Sequence[Times]) -> list[Bar]:
    """Return the bars: in wall seconds, on a busy machine in processor seconds."""
    is_busy = median(each.wall_s / each.cpu_s for each in imports) > BUSY
    unit, key = ("processor", "cpu_in_imports") if is_busy else ("wall", "wall_in_imports")
    return [
        Bar.at_most(f"{name}: {unit} seconds, in imports of torch", ours[name][key], bar) for name, bar in BARS.items()
    ]


def main() -> int:
    """Measure, and print the result."""
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks.startup", description=(__doc__ or "").partition("\n")[0]
    )
    parser.add_argument("--passes", type=int, default=5, help="runs of each command, after a first one")
    parser.add_argument("--quick", action="store_true", help="one pass without Flower: a check that it works")
    arguments = parser.parse_args()
    passes = 1 if arguments.quick else arguments.passes
    keep_bytecode()
    with tempfile.TemporaryDirectory(prefix="atoll-bench-") as place:
        folder = prepare(Path(place))
        subjects, imports = measure(folder, passes)
        theirs, why_not = None, "--quick"
        if not arguments.quick:
            try:
                theirs = flower(folder, passes)
            except NotMeasured as why:
                why_not = str(why)
    ours = {name: subject.summary(imports) for name, subject in subjects.items()}
    bare = {key: spread([getattr(each, key) for each in imports]) for key in ("wall_s", "cpu_s")}
    return conclude("startup", bars_of(ours, imports), ours={IMPORT: bare, **ours}, theirs=theirs, why_not=why_not)


if __name__ == "__main__":
    sys.exit(main())
