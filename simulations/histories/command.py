"""The command `atoll simulate --faults`, which judges many seeds or shows one."""

import sys
import time
from typing import TextIO

from atoll.aggregation.printable import count_of
from atoll.parallel.task.json_text import to_json
from atoll.protocol.settings import ConfigError
from atoll.simulations.histories.checks import faults_of
from atoll.simulations.histories.faults import PRESETS
from atoll.simulations.histories.scenario import random_scenario
from atoll.simulations.histories.soak import Tally, soak
from atoll.simulations.histories.world import World

BAD_SHOWN = 3


def judge_histories(
    preset: str = "standard",
    *,
    seeds: int = 1000,
    first: int = 0,
    seed: int | None = None,
    jobs: int = 0,
    as_json: bool = False,
) -> int:
    """Judge histories with the preset's faults, or replay one seed; return 0 if all are good, otherwise 1.

    Args:
        preset: a name in `faults.PRESETS`.
        seeds: the number of seeds.
        first: the first seed.
        seed: a seed to replay, with its whole history; None: judge many.
        jobs: the number of processes; 0: one for each processor.
        as_json: print a JSON object instead of text.

    Raises:
        ConfigError: the preset is unknown, or a number is out of its range.
    """
    faults = []
    if preset not in PRESETS:
        faults.append(f"--faults {preset}: unknown; allowed: {', '.join(PRESETS)}")
    if seeds < 1:
        faults.append(f"--seeds {seeds}: too few; allowed: at least 1")
    if jobs < 0:
        faults.append(f"--jobs {jobs}: too few; allowed: at least 1, or 0 for one on each processor")
    if faults:
        raise ConfigError(faults)
    if seed is not None:
        return _show(seed, preset, as_json=as_json)
    return _judge(preset, first, seeds, jobs, as_json=as_json)


def _judge(preset: str, first: int, count: int, jobs: int, *, as_json: bool) -> int:
    begun = time.perf_counter()
    progress = None if as_json or not sys.stderr.isatty() else _Progress(count, sys.stderr)
    result = soak(first, count, preset=preset, jobs=jobs, on_progress=progress)
    seconds = time.perf_counter() - begun
    if as_json:
        print(to_json({"preset": preset, "first": first, "seconds": round(seconds, 3), **result.document()}))
        return 1 if result.bad else 0
    for _, text in sorted(result.bad.items())[:BAD_SHOWN]:
        print(f"{text}\n", file=sys.stderr)
    print(result.text(seconds))
    if result.bad:
        seeds = ", ".join(map(str, sorted(result.bad)))
        print(f"bad seeds: {seeds}; atoll simulate --faults {preset} --seed N replays one")
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


def _show(seed: int, preset: str, *, as_json: bool) -> int:
    """Print the whole history of a seed and its faults; return 1 if it has any."""
    world, wrong = World(seed, random_scenario(seed, preset)), []
    try:
        wrong = list(faults_of(world.run()))
    except Exception as error:  # nothing narrower: a machine may raise anything, and the transcript shows the cause
        wrong = [f"{type(error).__name__}: {error}"]
    transcript = world.history.transcript()
    if as_json:
        print(to_json({"preset": preset, "seed": seed, "wrong": wrong, "history": transcript.splitlines()}))
        return 1 if wrong else 0
    print(transcript)
    print("\n".join(["", *(f"WRONG: {what}" for what in wrong)]) if wrong else "\nnothing is wrong")
    return 1 if wrong else 0
