"""Sites that ignore the clip bound under secure sums: accuracy beside that without them, and who is named.

    python -m benchmarks.secure_poisoning [--seeds N] [--rounds N]

scikit-learn's digits, a 64-32-10 net, 40 sites in each round, 8 sessions, five local steps. Of the sites 8 send -100
times their update, unclipped. The sum of a session with such a site is longer than its members may make it, and it
alone is dropped; a site that was in no sum that counts for six rounds in a row rests and is named. An entry is the
accuracy on the server's test data, as the mean over the last five versions.
"""

import argparse
import json
import sys
import tempfile
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from atoll.operations.load import load_run, load_user_task
from atoll.protocol.vocabulary import RoundId
from atoll.simulations.federation.config import SimulationFile
from atoll.simulations.federation.run import opened
from benchmarks.report import Bar, conclude

TASK = "benchmarks.papers.digits:task"
LAST = 5
"""Number of last versions whose mean accuracy counts."""
SITES, BAD, SESSIONS = 40, 8, 8
LOSS_MAX = 0.02
"""Accuracy that 8 bad sites of 40 may cost."""

BASE = {
    "population.kind": "iid",
    "population.clients": SITES,
    "round.cohort_size": SITES,
    "round.quorum": 3,
    "local.lr": 0.3,
    "simulation.engine": "batched",
    "simulation.workers": 1,
}
SECURE = {"secure.clip_norm": 2.0, "secure.examples_max": 40, "secure.sessions": SESSIONS}
ATTACK = {"attack.kind": "scaled_flip", "attack.factor": 100, "attack.malicious": BAD}


def simulated(folder: Path, **changes: Any) -> dict[str, Any]:
    """Run one simulation, and return what it shows."""
    settings = {**BASE, **{name.replace("__", "."): value for name, value in changes.items()}}
    file = load_run(TASK, [f"{name}={value}" for name, value in settings.items()], kind=SimulationFile)
    named: set[str] = set()
    lines: list[dict[str, Any]] = []

    def note(line: dict[str, Any]) -> None:
        lines.append(line)
        record = federation.machine.record_of(RoundId(line["round"]))
        named.update(record.only_dropped if record is not None else ())

    with opened(file, load_user_task(file.task), folder, on_round=note, is_fresh=True) as federation:
        began = time.process_time()
        result = federation.run()
        seconds = time.process_time() - began
    accuracies = [line["server"]["accuracy"] for line in lines if line["server"]][-LAST:]
    dropped = [sum(bool(each.get("dropped")) for each in line.get("sums", ())) for line in lines]
    return {
        "accuracy": sum(accuracies) / max(1, len(accuracies)),
        "versions": result["version"],
        "dropped": sum(dropped),
        "malicious": sorted(result.get("malicious", ())),
        "named": sorted(named),
        "cpu_s": seconds,
    }


def poisoned(
    folder: Path, rounds: int, seed: int, settings: Mapping[str, Any]
) -> tuple[dict[str, Any], dict[str, Any]]:
    """Return the runs without bad sites and with them."""
    given = {"rounds": rounds, "seed": seed, **settings}
    return simulated(folder / "none", **given), simulated(folder / "bad", **given, **ATTACK)


def main() -> int:
    """Run the benchmark."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else "")
    parser.add_argument("--seeds", type=int, default=3)
    parser.add_argument("--rounds", type=int, default=60)
    options = parser.parse_args()
    bars, ours = [], {}
    for seed in range(1, options.seeds + 1):
        with tempfile.TemporaryDirectory() as name:
            none, bad = poisoned(Path(name), options.rounds, seed, SECURE)
        bars.append(Bar.at_most(f"accuracy lost, seed {seed}", none["accuracy"] - bad["accuracy"], LOSS_MAX))
        are_named = len({*bad["malicious"]} & {*bad["named"]})
        bars.append(Bar.at_least(f"bad sites that are named, seed {seed}", are_named, BAD))
        ours[f"seed {seed}"] = {"none": none, "bad": bad}
        print(json.dumps(ours[f"seed {seed}"]), flush=True)
    return conclude("secure_poisoning", bars, ours=ours, theirs={})


if __name__ == "__main__":
    sys.exit(main())
