"""Seeded histories of faults, judged by the guarantees: python -m tests.histories --seeds 20000."""

import argparse
import sys
import time
from typing import TextIO

from atoll.ground.printable import count_of
from tests.histories.checks import faults_of
from tests.histories.faults import PRESETS
from tests.histories.scenario import random_scenario
from tests.histories.soak import Tally, soak
from tests.histories.world import World

BAD_SHOWN = 3


def main(arguments: list[str] | None = None) -> int:
    """Judge histories with the faults of a preset, or replay one seed; return 0 if all are good, otherwise 1."""
    parser = argparse.ArgumentParser(prog="python -m tests.histories", description=__doc__)
    parser.add_argument("--faults", default="standard", choices=sorted(PRESETS), help="preset of the faults")
    parser.add_argument("--seeds", type=int, default=1000, help="number of histories to judge")
    parser.add_argument("--first", type=int, default=0, help="first seed")
    parser.add_argument("--seed", type=int, help="seed to replay, with its whole history")
    parser.add_argument("--jobs", type=int, default=0, help="number of processes; 0: one for each processor")
    options = parser.parse_args(arguments)
    if options.seeds < 1 or options.jobs < 0:
        parser.error("--seeds: at least 1; --jobs: at least 1, or 0 for one on each processor")
    if options.seed is not None:
        return _show(options.seed, options.faults)
    return _judge(options.faults, options.first, options.seeds, options.jobs)


def _judge(preset: str, first: int, count: int, jobs: int) -> int:
    begun = time.perf_counter()
    progress = _Progress(count, sys.stderr) if sys.stderr.isatty() else None
    result = soak(first, count, preset=preset, jobs=jobs, on_progress=progress)
    seconds = time.perf_counter() - begun
    for _, text in sorted(result.bad.items())[:BAD_SHOWN]:
        print(f"{text}\n", file=sys.stderr)
    print(result.text(seconds))
    if result.bad:
        seeds = ", ".join(map(str, sorted(result.bad)))
        print(f"bad seeds: {seeds}; python -m tests.histories --faults {preset} --seed N replays one")
    return 1 if result.bad else 0


class _Progress:
    """A line of progress that is overwritten."""

    def __init__(self, count: int, out: TextIO) -> None:
        self._count, self._out = count, out

    def __call__(self, so_far: Tally) -> None:
        done = so_far.num_histories
        end = "\n" if done == self._count else ""
        self._out.write(f"\r{done} of {count_of(self._count, 'history', 'histories')}, {len(so_far.bad)} bad{end}")
        self._out.flush()


def _show(seed: int, preset: str) -> int:
    """Print the whole history of a seed and its faults; return 1 if it has any."""
    world, wrong = World(seed, random_scenario(seed, preset)), []
    try:
        wrong = list(faults_of(world.run()))
    except Exception as error:  # nothing narrower: a machine may raise anything, and the transcript shows the cause
        wrong = [f"{type(error).__name__}: {error}"]
    print(world.history.transcript())
    print("\n".join(["", *(f"WRONG: {what}" for what in wrong)]) if wrong else "\nnothing is wrong")
    return 1 if wrong else 0


if __name__ == "__main__":
    sys.exit(main())
