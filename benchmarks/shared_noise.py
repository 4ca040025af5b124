"""What shared noise of examples is worth to few silos: digits, four sites, epsilon 1, beside noise at each site.

    python -m benchmarks.shared_noise [--seeds N] [--epsilon E]

scikit-learn's digits, one linear layer (650 values), four sites of some 360 images each, the same epsilon at delta
1e-5: ten rounds of 15 steps, in which each site adds its noise, and 150 rounds of one step, whose noise the sites of a
secure sum share. The noise of a simulation follows from its seed: the figures say what noise does, and protect nothing.
An entry is the accuracy on the server's test data of the last version.
"""

import argparse
import dataclasses
import json
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

from torch import nn

from atoll.operations.load import load_run
from atoll.simulations.federation.config import SimulationFile
from atoll.simulations.federation.run import opened
from benchmarks.papers import digits
from benchmarks.report import Bar, conclude

TASK = "benchmarks.shared_noise:task"
SITES, RATE, STEPS, BAR = 4, 0.1, 150, 0.10


def make_model() -> nn.Module:
    """Build a linear layer that starts at zero."""
    layer = nn.Linear(64, 10)
    nn.init.zeros_(layer.weight)
    nn.init.zeros_(layer.bias)
    return nn.Sequential(nn.Flatten(), layer)


task = dataclasses.replace(digits.task, model=make_model)
"""The digits with a linear model."""

BASE = {
    "population.kind": "iid",
    "population.clients": SITES,
    "round.cohort_size": SITES,
    "round.quorum": 3,
    "simulation.engine": "sequential",
    "simulation.workers": 1,
    "privacy.unit": '"example"',
    "privacy.delta": 1e-5,
    "privacy.clip_norm": 1.0,
    "privacy.sample_rate": RATE,
}
AT_EACH_SITE = {"rounds": 10, "local.max_steps": STEPS // 10, "local.lr": 0.25}
SHARED = {
    "rounds": STEPS,
    "local.max_steps": 1,
    "privacy.noise_by": '"clients"',
    "privacy.batch": 36,
    "secure.clip_norm": 1.0,
    "aggregation.weighting": '"uniform"',
    "optimizer.lr": 1.0,
}


def simulated(folder: Path, settings: dict[str, Any]) -> dict[str, Any]:
    """Run one simulation, and return what it shows."""
    file = load_run(TASK, [f"{name}={value}" for name, value in settings.items()], kind=SimulationFile)
    lines: list[dict[str, Any]] = []
    began = time.process_time()
    with opened(file, task, folder, on_round=lines.append, is_fresh=True) as federation:
        result = federation.run()
    account = result["privacy"]
    return {
        "accuracy": [line["server"]["accuracy"] for line in lines if line["server"]][-1],
        "versions": result["version"],
        "epsilon": account["epsilon"],
        "noise_multiplier": account["noise_multiplier"],
        "cpu_s": round(time.process_time() - began, 2),
    }


def main() -> int:
    """Run the benchmark."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else "")
    parser.add_argument("--seeds", type=int, default=3)
    parser.add_argument("--epsilon", type=float, default=1.0)
    options = parser.parse_args()
    bars, ours = [], {}
    for seed in range(1, options.seeds + 1):
        found: dict[str, Any] = {}
        for name, more in (("at each site", AT_EACH_SITE), ("shared", SHARED)):
            with tempfile.TemporaryDirectory() as folder:
                given = {**BASE, "seed": seed, "privacy.epsilon": options.epsilon, **more}
                found[name] = simulated(Path(folder) / "run", given)
            print(json.dumps({"seed": seed, "noise": name, **found[name]}), flush=True)
            spent = found[name]["epsilon"]
            bars.append(Bar.at_most(f"epsilon spent, noise {name}, seed {seed}", spent, options.epsilon * (1 + 1e-9)))
        ours[f"seed {seed}"] = found
        above = found["shared"]["accuracy"] - found["at each site"]["accuracy"]
        bars.append(Bar.at_least(f"accuracy above noise at each site, seed {seed}", above, BAR))
    return conclude("shared_noise", bars, ours=ours, theirs={})


if __name__ == "__main__":
    sys.exit(main())
