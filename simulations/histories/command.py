"""What `atoll simulate --faults` does: many seeds are judged, or one is shown."""

import json
import sys
import time
from typing import TextIO

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
    """Judge histories with the preset's faults, or replay one seed; 0 when nothing in them is wrong, otherwise 1.

    Args:
        preset: a name in `faults.PRESETS`.
        seeds: how many.
        first: the first of them.
        seed: replay this one and print its whole history.
        jobs: processes; 0: one for each processor.
        as_json: print one JSON object and nothing else.

    Raises:
        ConfigError: no such preset, or no seed to judge.
    """
    faults = []
    if preset not in PRESETS:
        faults.append(f"--faults {preset}: no such faults; there are {', '.join(PRESETS)}")
    if seeds < 1:
        faults.append(f"--seeds {seeds}: at least 1")
    if jobs < 0:
        faults.append(f"--jobs {jobs}: at least 1, or 0 for one on each processor")
    if faults:
        raise ConfigError(faults)
    if seed is not None:
        return _show(seed, preset, as_json=as_json)
    return _judge(preset, first, seeds, jobs, as_json=as_json)


def _judge(preset: str, first: int, count: int, jobs: int, *, as_json: bool) -> int:
    begun = time.perf_counter()
    progress = None if as_json or not sys.stderr.isatty() else _Progress(count, sys.stderr)
    found = soak(first, count, preset=preset, jobs=jobs, on_progress=progress)
    seconds = time.perf_counter() - begun
    if as_json:
        print(json.dumps({"preset": preset, "first": first, "seconds": round(seconds, 3), **found.document()}))
        return 1 if found.bad else 0
    for _, text in sorted(found.bad.items())[:BAD_SHOWN]:
        print(f"{text}\n", file=sys.stderr)
    print(found.text(seconds))
    if found.bad:
        seeds = ", ".join(map(str, sorted(found.bad)))
        print(f"bad seeds: {seeds}; atoll simulate --faults {preset} --seed N replays one")
    return 1 if found.bad else 0


class _Progress:
    """One line that is written over."""

    def __init__(self, count: int, out: TextIO) -> None:
        self._count, self._out = count, out

    def __call__(self, so_far: Tally) -> None:
        done = so_far.num_histories
        end = "\n" if done == self._count else ""
        self._out.write(f"\r{done} of {self._count} histories, {len(so_far.bad)} bad{end}")
        self._out.flush()


def _show(seed: int, preset: str, *, as_json: bool) -> int:
    """The same seed gives the same history: here is all of it, and what is wrong with it."""
    world, wrong = World(seed, random_scenario(seed, preset)), []
    try:
        wrong = list(faults_of(world.run()))
    except Exception as error:  # whatever a machine raises, the history says how it came to that
        wrong = [f"{type(error).__name__}: {error}"]
    transcript = world.history.transcript()
    if as_json:
        print(json.dumps({"preset": preset, "seed": seed, "wrong": wrong, "history": transcript.splitlines()}))
        return 1 if wrong else 0
    print(transcript)
    print("\n".join(["", *(f"WRONG: {what}" for what in wrong)]) if wrong else "\nnothing is wrong")
    return 1 if wrong else 0
