"""Rounds over narrow lines beside busy processes: `python -m tests.federation.bad_luck.narrow_lines`.

It takes thirteen minutes. A model of 2 MB and a federation of one site for each line: 20 kB/s with 200 ms there and
back, and 40 kB/s with 300 ms, both with small buffers on the way. Two processes keep two processors busy. Every round
must commit without a retry, and no connection may end by a time-out; a line that is cut for good at the end must be
found. The last line is JSON; exit code 1: it was not so.
"""

import argparse
import json
import multiprocessing
import re
import sys
import tempfile
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

from atoll.protocol.vocabulary import Phase
from benchmarks import reaper
from tests.federation.bad_luck.slow_line import SlowLine
from tests.federation.processes import Federation, ended_after

LINES = {"20 kB/s": (20e3, 0.1), "40 kB/s": (40e3, 0.15)}
FOUND, FOUND_S = "no connection to", 90.0
TASK = """
import numpy as np
from atoll import Trained

class Narrow:
    sites = ("north",)
    def initial(self, seed):
        return {"w": np.random.default_rng(seed).standard_normal(500_000).astype(np.float32)}
    def num_examples(self, site):
        return 10
    def train(self, parameters, instructions):
        return Trained({"w": parameters["w"] + np.float32(1)}, 10, {"loss": (5.0, 10.0)})

task = Narrow()
"""
CUT = re.compile(r"timed out|timeout|was cut|no connection to|broken off")


def rounds_over(folder: Path, rate: float, delay: float, rounds: int) -> dict[str, object]:
    """Let a federation train over a line; return what became of its rounds, and the lines about cut connections."""
    folder.mkdir()
    (folder / "narrow_task.py").write_text(TASK)
    with ended_after(Federation(folder, task=f"{folder / 'narrow_task.py'}:task")) as it:
        with SlowLine(it.address, rate=rate, delay=delay) as line:
            it.coordinator(rounds=rounds, round__cohort_size=1, round__deadline=1200, stay=True)
            it.wait_for(lambda: (it.state / "coordinator.json").exists() or None)
            it.agent("north", address=line.address, exit_when_done=False)
            last = f"the update of round {rounds} of trouble-1 is accepted"
            it.wait_for(lambda: last in it.log("north") or None, timeout=600.0 * rounds, every=0.5)
            time.sleep(1.0)
            cuts = [text for name in ("coordinator", "north") for text in it.log(name).splitlines() if CUT.search(text)]
            line.is_cut, begun, known = True, time.monotonic(), it.log("north").count(FOUND)
            it.wait_for(lambda: it.log("north").count(FOUND) > known or None, timeout=FOUND_S)
            found_s = time.monotonic() - begun
        records = it.rounds()
        return {
            "cuts": cuts,
            "committed": sum(record.phase is Phase.COMMITTED for record in records),
            "rounds": len(records),
            "seconds": [round(record.ended_at - record.opened_at) for record in records if record.ended_at],
            "found_after_s": round(found_s),
            "log": it.log("north"),
        }


def _busy() -> None:
    while True:
        sum(range(10_000))


def main() -> int:
    """Train over all lines at once beside busy processes; return the exit code."""
    parser = argparse.ArgumentParser(description="Rounds over narrow lines beside busy processes.")
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--busy", type=int, default=2, help="processes that keep a processor busy")
    given = parser.parse_args()
    reaper.watch()
    busy = [multiprocessing.get_context("spawn").Process(target=_busy, daemon=True) for _ in range(given.busy)]
    for process in busy:
        process.start()
    with tempfile.TemporaryDirectory(prefix="atoll-narrow-") as folder, ThreadPoolExecutor(len(LINES)) as pool:
        trained = {
            name: pool.submit(rounds_over, Path(folder) / name.replace("/", "-"), *line, given.rounds)
            for name, line in LINES.items()
        }
        found = {name: each.result() for name, each in trained.items()}
    for process in busy:
        process.terminate()
    for name, result in found.items():
        print(f"{name}:\n{result.pop('log')}")
    print(json.dumps(found))
    wanted = {"cuts": [], "committed": given.rounds, "rounds": given.rounds}
    return 0 if all(wanted.items() <= result.items() for result in found.values()) else 1


if __name__ == "__main__":
    sys.exit(main())
