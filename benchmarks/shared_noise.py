"""What shared noise of examples is worth to four silos: digits, beside noise at each site, at the same epsilon.

    python -m benchmarks.shared_noise [--seeds N,N,..] [--pairs NAME,..] [--set NAME=VALUE]

    rate 2        epsilon 1, one learning rate for both, 2
    best rates    epsilon 1, each with the learning rate that is best for it
    epsilon 0.3   the same at epsilon 0.3

scikit-learn's digits, one linear layer (650 values), four sites of some 360 images each, delta 1e-5, 150 steps of
samples with rate 0.2: ten rounds of 15 steps, in which each site adds its noise, and 150 rounds of one step, whose
noise the sites of a secure sum share, three of them being honest. The best rates were chosen
by loops in numpy over the same data with seeds 11 to 14, so the default is three others. The noise of a simulation
follows from its seed: the figures say what noise does, and protect nothing. An entry is the accuracy on the server's
test data of the last version.
"""

import argparse
import dataclasses
import json
import sys
import tempfile
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from torch import nn

from atoll.operations.load import load_run
from atoll.simulations.federation.config import SimulationFile
from atoll.simulations.federation.run import opened
from benchmarks.papers import digits
from benchmarks.report import Bar, conclude, say

TASK = "benchmarks.shared_noise:task"
SITES, BATCH, SITE_EXAMPLES, STEPS, LOCAL_STEPS, BAR = 4, 72, 360, 150, 15, 0.10

AT_EACH, SHARED = "at each site", "shared"


@dataclass(frozen=True, slots=True)
class Pair:
    """Two runs with one epsilon, and the learning rate of each."""

    epsilon: float
    at_each: float
    shared: float


PAIRS = {
    "rate 2": Pair(1.0, at_each=2.0, shared=2.0),
    "best rates": Pair(1.0, at_each=0.5, shared=1.0),
    "epsilon 0.3": Pair(0.3, at_each=0.2, shared=0.4),
}


def make_model() -> nn.Module:
    """Build a linear layer that starts at zero."""
    layer = nn.Linear(64, 10)
    nn.init.zeros_(layer.weight)
    nn.init.zeros_(layer.bias)
    return nn.Sequential(nn.Flatten(), layer)


task = dataclasses.replace(digits.task, model=make_model)
"""The digits with a linear model."""

BASE: dict[str, Any] = {
    "population.kind": "iid",
    "population.clients": SITES,
    "round.cohort_size": SITES,
    "round.quorum": SITES,
    "simulation.engine": "batched",
    "simulation.workers": 1,
    "privacy.unit": '"example"',
    "privacy.delta": 1e-5,
    "privacy.clip_norm": 1.0,
    "privacy.sample_rate": BATCH / SITE_EXAMPLES,
}


def sides_of(pair: Pair) -> dict[str, dict[str, Any]]:
    """Return the settings of both runs of a pair."""
    both = {**BASE, "privacy.epsilon": pair.epsilon}
    return {
        AT_EACH: {**both, "rounds": STEPS // LOCAL_STEPS, "local.max_steps": LOCAL_STEPS, "local.lr": pair.at_each},
        SHARED: {
            **both,
            "rounds": STEPS,
            "local.max_steps": 1,
            "privacy.noise_by": '"clients"',
            "privacy.honest_min": SITES - 1,
            "privacy.batch": BATCH,
            "secure.clip_norm": 1.0,
            "aggregation.weighting": '"uniform"',
            "optimizer.lr": pair.shared,
        },
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
    parser.add_argument("--seeds", default="1,2,3")
    parser.add_argument("--pairs", default=",".join(PAIRS))
    parser.add_argument("--set", action="append", default=[], metavar="NAME=VALUE", help="of every run, to try others")
    options = parser.parse_args()
    more = dict(text.split("=", 1) for text in options.set)
    seeds = [int(text) for text in options.seeds.split(",")]
    bars, ours = [], {}
    for name in options.pairs.split(","):
        reached: dict[str, list[float]] = {AT_EACH: [], SHARED: []}
        for seed in seeds:
            for side, settings in sides_of(PAIRS[name]).items():
                with tempfile.TemporaryDirectory() as folder:
                    found = simulated(Path(folder) / "run", {**settings, "seed": seed, **more})
                say(json.dumps({"pair": name, "seed": seed, "noise": side, **found}))
                ours[f"{name}, noise {side}, seed {seed}"] = found
                reached[side].append(found["accuracy"])
                limit = PAIRS[name].epsilon * (1 + 1e-9)
                bars.append(Bar.at_most(f"{name}, noise {side}: epsilon spent, seed {seed}", found["epsilon"], limit))
        above = (sum(reached[SHARED]) - sum(reached[AT_EACH])) / len(seeds)
        bars.append(Bar.at_least(f"{name}: mean accuracy above noise at each site", above, BAR))
    return conclude("shared_noise", bars, ours=ours, theirs={})


if __name__ == "__main__":
    sys.exit(main())
