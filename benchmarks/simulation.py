"""The client trainings per second of `atoll simulate`, against Flower's simulation, pfl-research and a tight loop.

    python -m benchmarks.simulation [--settings digits-mlp 2nn cnn] [--pairs 7] [--seconds 3] [--quick]

FedAvg with E = 1, B = 10 and no evaluation, with the same models and data on every side:

    digits-mlp   64-32-10, 100 clients of 18 examples, all of them in each round
    2nn          784-200-200-10, 1,000 clients of 60 examples, 100 in each round
    cnn          McMahan's, 1,000 clients of 60 examples, 10 in each round

Each side is a process that runs rounds on demand, so that sides take turns on the same cores. A peer has the best of a
printed sweep of its settings, Atoll the settings that `atoll simulate` chooses. A side that does not learn is an error.
`make peers` installs the peers.
"""

import argparse
import json
import os
import subprocess
import sys
import threading
from collections.abc import Sequence
from contextlib import ExitStack
from pathlib import Path
from types import TracebackType
from typing import Any, Self

from benchmarks.learners import LEARNED, MARK
from benchmarks.report import Bar, conclude, say, spread
from benchmarks.tight_loops import SETTINGS

ROOT = Path(__file__).resolve().parents[1]
TURN_MAX_S = 240.0
"""Seconds after which a side without an answer is ended, its start included."""

PEERS = ROOT / ".venv-peers" / "bin"

BARS = {
    "digits-mlp": {"flower": 60.0, "pfl": 12.0, "tight": 0.95},
    "2nn": {"flower": 9.0, "pfl": 2.0, "tight": 0.95},
    "cnn": {"flower": 2.0, "pfl": 1.2, "tight": 0.95},
}

TITLES = {"flower": "Flower's simulation", "pfl": "pfl-research", "tight": "the tight loop, a process for each core"}


def peers_of(setting: str, cores: int) -> dict[str, dict[str, list[str]]]:
    """Return the commands of each peer, by setting."""
    python, torchrun = str(PEERS / "python"), str(PEERS / "torchrun")
    flower = [python, "-m", "benchmarks.peer_flower", setting]
    pfl = ["-m", "benchmarks.peer_pfl", setting]
    return {
        "flower": {
            f"{cores} clients at once": [*flower, "1", "1"],
            f"{2 * cores} clients at once": [*flower, "0.5", "1"],
            f"one client at once, {cores} threads": [*flower, str(cores), str(cores)],
        },
        "pfl": {
            "1 process": [python, *pfl, "1"],
            f"1 process, {cores} threads": [python, *pfl, str(cores)],
            f"{cores} processes": [torchrun, "--nproc-per-node", str(cores), *pfl, "1"],
        },
    }


class Side:
    """A process that runs rounds on demand."""

    def __init__(self, name: str, command: Sequence[str]) -> None:
        self.name, self.rates = name, list[float]()
        environment = os.environ | {"PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1"}
        self._process = subprocess.Popen(
            command,
            cwd=ROOT,
            env=environment,
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.DEVNULL,
            text=True,
        )

    def __enter__(self) -> Self:
        self._answer()  # it is ready
        return self

    def run(self, seconds: float, cohort: int) -> float:
        """Run rounds for at least this time, and return the clients per second."""
        found = self._ask(f"run {seconds}")
        self.rates.append(found["rounds"] * cohort / found["seconds"])
        return self.rates[-1]

    def end(self) -> dict[str, Any]:
        """End the process, and return its report.

        Raises:
            RuntimeError: the model has not learned.
        """
        found = self._ask("end")
        if not found["accuracy"] >= LEARNED:
            raise RuntimeError(f"{self.name} does not learn: accuracy {found['accuracy']:.2f}")
        return found

    def _ask(self, word: str) -> dict[str, Any]:
        assert self._process.stdin is not None
        self._process.stdin.write(word + "\n")
        self._process.stdin.flush()
        return self._answer()

    def _answer(self) -> dict[str, Any]:
        assert self._process.stdout is not None
        patience = threading.Timer(TURN_MAX_S, self._process.kill)
        patience.start()
        try:
            for line in self._process.stdout:
                if line.startswith(MARK):
                    found: dict[str, Any] = json.loads(line.removeprefix(MARK))
                    return found
        finally:
            patience.cancel()
        raise RuntimeError(f"{self.name} ended with exit code {self._process.wait()}")

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        assert self._process.stdin is not None
        self._process.stdin.close()  # ends a side that still waits for a command
        try:
            self._process.wait(60)
        except subprocess.TimeoutExpired:
            self._process.kill()


def best_of(setting: str, peer: str, commands: dict[str, list[str]], seconds: float) -> tuple[str, dict[str, float]]:
    """Return the fastest setting of a peer, and the rate of each [clients/s]."""
    found = {}
    for how, command in commands.items():
        try:
            with Side(f"{peer}, {how}", command) as side:
                rate = side.run(seconds, SETTINGS[setting][4])
                side.end()
        except (RuntimeError, OSError) as error:
            say(f"  sweep {setting}: not measured: {error}")
            continue
        found[how] = rate
        say(f"  sweep {setting}: {peer}, {how}: {found[how]:.1f} clients/s")
    if not found:
        raise SystemExit(f"{setting}: {peer} ran with none of its settings")
    return max(found, key=lambda how: found[how]), found


def measure(setting: str, pairs: int, seconds: float, with_peers: bool) -> dict[str, Any]:
    """Return the rates of all sides, measured in turns."""
    cores, cohort = len(os.sched_getaffinity(0)), SETTINGS[setting][4]
    ours = [sys.executable, "-m", "benchmarks.simulation_side"]
    commands = {
        "atoll": [*ours, "atoll", setting, "auto", "0"],
        "tight": [*ours, "tight", setting, str(cores)],
    }
    sweeps: dict[str, Any] = {}
    for peer, ways in peers_of(setting, cores).items() if with_peers else ():
        best, found = best_of(setting, peer, ways, seconds)
        sweeps[peer] = {"best": best, "clients_per_s": {how: round(rate, 1) for how, rate in found.items()}}
        commands[peer] = ways[best]
    with ExitStack() as stack:
        sides = [stack.enter_context(Side(name, command)) for name, command in commands.items()]
        for number in range(1 + pairs):
            for side in sides:
                side.run(seconds, cohort)
            if not number:  # the first turn warms up
                for side in sides:
                    side.rates.clear()
        learned = {side.name: side.end() for side in sides}
    return {
        "clients_per_s": {side.name: spread(side.rates, 1) for side in sides},
        "times": {side.name: _ratio(sides[0].rates, side.rates) for side in sides[1:]},
        "accuracy": {name: round(found["accuracy"], 3) for name, found in learned.items()},
        "engine": learned["atoll"]["engine"],
        "sweeps": sweeps,
        "pairs": pairs,
    }


def _ratio(ours: Sequence[float], theirs: Sequence[float]) -> dict[str, float]:
    return spread([mine / other for mine, other in zip(ours, theirs, strict=True)], 2)


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks.simulation", description=(__doc__ or "").partition("\n")[0]
    )
    parser.add_argument("--settings", nargs="+", choices=list(BARS), default=list(BARS))
    parser.add_argument("--pairs", type=int, default=7)
    parser.add_argument("--seconds", type=float, default=3.0, help="least seconds of each turn")
    parser.add_argument("--quick", action="store_true", help="the smallest setting, one short turn, without the peers")
    given = parser.parse_args(arguments)
    if given.quick:
        given.settings, given.pairs, given.seconds = ["digits-mlp"], 1, 0.2
    why_not = "left out by --quick" if given.quick else "" if (PEERS / "ray").exists() else "run `make peers` first"
    found = {}
    for setting in given.settings:
        found[setting] = measure(setting, given.pairs, given.seconds, not why_not)
        say(f"  {setting}: {found[setting]['clients_per_s']}, {found[setting]['times']}, {found[setting]['engine']}")
    bars = [
        Bar.at_least(f"{setting}: times {TITLES[side]}", times["median"], BARS[setting][side])
        for setting, one in found.items()
        for side, times in one["times"].items()
    ]
    theirs = {"versions": "flwr 1.41.0, ray 2.55.1, pfl 0.6.0", "figures": "beside ours"}
    return conclude("simulation", bars, ours=found, theirs=None if why_not else theirs, why_not=why_not)


if __name__ == "__main__":
    sys.exit(main())
