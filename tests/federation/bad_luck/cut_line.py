"""A slow line that is cut for six minutes in each phase of a round: `python -m tests.federation.bad_luck.cut_line`.

It takes half an hour. A model of 2 MB, a line of 20 kB/s with 200 ms there and back. For each phase there is a
federation of one site, whose line is cut once in the first round; every round must commit, without a retry. All
settings have their defaults but the deadline: the line needs 216 s and the cut 360 s, which leaves 24 of the 600 s of
the default. The last line is JSON; exit code 1: a round did not.
"""

import argparse
import json
import sys
import tempfile
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

from atoll.protocol.vocabulary import Phase
from benchmarks import reaper
from tests.federation.bad_luck.slow_line import SlowLine
from tests.federation.processes import Federation, ended_after

ROUNDS = 2
TASK = """
import time
from pathlib import Path
import numpy as np
from atoll import Trained

class Slow:
    sites = ("north",)
    def initial(self, seed):
        return {"w": np.random.default_rng(seed).standard_normal(500_000).astype(np.float32)}
    def num_examples(self, site):
        return 10
    def train(self, parameters, instructions):
        Path(__file__).with_name("training").touch()
        time.sleep(10)
        return Trained({"w": parameters["w"] + np.float32(1)}, 10, {"loss": (5.0, 10.0)})

task = Slow()
"""
PHASES = {
    "download": "downloading ",
    "upload": "uploading the update of round 1 ",
    "between": "the update of round 1 of trouble-1 is accepted",
}
"""The phases of a round by the line of the agent's log at which each begins; the task tells of its training itself."""


def cut_in(phase: str, folder: Path, cut_s: float) -> dict[str, object]:
    """Let a federation train over a line that is cut in a phase of its first round; return what became of it."""
    folder.mkdir()
    (folder / "slow_task.py").write_text(TASK)
    with ended_after(Federation(folder, task=f"{folder / 'slow_task.py'}:task")) as it:
        with SlowLine(it.address, rate=20e3, delay=0.1) as line:
            it.coordinator(rounds=ROUNDS, round__cohort_size=1, round__deadline=900)
            it.agent("north", address=line.address)
            it.wait_for(lambda: _has_begun(phase, it) or None, timeout=300, every=0.1)
            time.sleep(5.0 if phase in ("download", "upload") else 0.5)  # in the middle of it
            line.is_cut = True
            time.sleep(cut_s)
            line.is_cut = False
            code = it.wait_for_end(timeout=1800)
        records = it.rounds()
        return {
            "exit_code": code,
            "committed": sum(record.phase is Phase.COMMITTED for record in records),
            "rounds": len(records),
            "seconds": [round(record.ended_at - record.opened_at) for record in records if record.ended_at],
            "log": it.log("coordinator"),
        }


def _has_begun(phase: str, it: Federation) -> bool:
    return bool((it.folder / phase).exists() if phase == "training" else PHASES[phase] in it.log("north"))


def main() -> int:
    """Cut a line in each phase, all at once; return the exit code."""
    parser = argparse.ArgumentParser(description="A slow line that is cut in each phase of a round.")
    parser.add_argument("--minutes", type=float, default=6.0, help="how long it is cut")
    cut_s = 60.0 * parser.parse_args().minutes
    reaper.watch()
    phases = (*PHASES, "training")
    with tempfile.TemporaryDirectory(prefix="atoll-cut-") as folder, ThreadPoolExecutor(4) as pool:
        cuts = {phase: pool.submit(cut_in, phase, Path(folder) / phase, cut_s) for phase in phases}
        found = {phase: cut.result() for phase, cut in cuts.items()}
    for phase, result in found.items():
        print(f"{phase}:\n{result.pop('log')}")
    print(json.dumps(found))
    wanted = {"exit_code": 0, "committed": ROUNDS, "rounds": ROUNDS}
    return 0 if all(wanted.items() <= result.items() for result in found.values()) else 1


if __name__ == "__main__":
    sys.exit(main())
