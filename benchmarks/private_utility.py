"""The cost of privacy in accuracy: digits of 400 clients and of 4 silos, by epsilon, beside the same run without it.

    python -m benchmarks.private_utility [--seeds N,N,..] [--cases NAME,..] [--epsilons E,E,..]

    clients   400 clients of three or four images each, all of them in each round; a guarantee for clients
    silos     4 sites of 360 images each, ten rounds of 15 private steps at each; a guarantee for examples
    apart     the clients in cohorts of 40, each again after ten rounds: noise that is correlated over rounds beside
              noise that is not, both at epsilon 2

scikit-learn's digits, one linear layer (650 values), delta 1e-5. The noise is calibrated so that each client may be in
every round within epsilon. The settings below were chosen by seed 1 (clients) and 11 to 14 (silos), so the default is
the next two; those of `apart` are the ones of the clients.
The noise of a simulation follows from its seed: the figures say what noise does, and protect nothing. An entry is the
accuracy on the server's test data of the last version.
"""

import argparse
import dataclasses
import json
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

from torch import nn

from atoll.operations.load import load_run
from atoll.simulations.federation.config import SimulationFile
from atoll.simulations.federation.run import opened
from benchmarks.papers import digits
from benchmarks.report import Bar, conclude, say

TASK = "benchmarks.private_utility:task"
DELTA = 1e-5
BAR_EPSILON = 8.0
BARS = {"clients": 0.90, "silos": 0.92}
"""Least accuracy of each case at this epsilon."""

Settings = dict[str, Any]


def make_model() -> nn.Module:
    """Build a linear layer that starts at zero."""
    layer = nn.Linear(64, 10)
    nn.init.zeros_(layer.weight)
    nn.init.zeros_(layer.bias)
    return nn.Sequential(nn.Flatten(), layer)


task = dataclasses.replace(digits.task, model=make_model)
"""The digits with a linear model."""

BOTH: Settings = {"population.kind": "iid", "simulation.workers": 1}
CLIENTS, SILOS, SITE_EXAMPLES = 400, 4, 360
BATCH = 72
COHORT, ROUNDS, APART_EPSILON = 40, 60, 2.0
SEPARATION = CLIENTS // COHORT
BASE: dict[str, Settings] = {
    "clients": {
        **BOTH,
        "population.clients": CLIENTS,
        "round.cohort_size": CLIENTS,
        "rounds": ROUNDS,
        "aggregation.weighting": '"uniform"',
        "local.lr": 1.0,
        "simulation.engine": "batched",
    },
    "apart": {
        **BOTH,
        "population.clients": CLIENTS,
        "round.cohort_size": COHORT,
        "rounds": ROUNDS,
        "aggregation.weighting": '"uniform"',
        "local.lr": 1.0,
        "simulation.engine": "batched",
    },
    "silos": {
        **BOTH,
        "population.clients": SILOS,
        "round.cohort_size": SILOS,
        "rounds": 10,
        "local.epochs": 15,
        "local.max_steps": 15,
        "local.batch_size": BATCH,
        "local.lr": 3.0,
        "schedule.local.lr": '{kind = "cosine", end = 0.1}',
        "simulation.engine": "sequential",
    },
}
PRIVATE: dict[str, Settings] = {
    "clients": {"privacy.delta": DELTA, "privacy.clip_norm": 2.0},
    "silos": {
        "privacy.unit": '"example"',
        "privacy.delta": DELTA,
        "privacy.clip_norm": 2.0,
        "privacy.sample_rate": BATCH / SITE_EXAMPLES,
    },
}
APART: dict[str, Settings] = {
    "independent": {**PRIVATE["clients"], "privacy.participations_max": ROUNDS // SEPARATION},
    "correlated": {
        **PRIVATE["clients"],
        "privacy.mechanism": '"correlated"',
        "privacy.separation_min": SEPARATION,
    },
}
"""The two mechanisms of a client that is in six sums."""


def budgets_of(case: str, epsilons: Sequence[float]) -> dict[str, Settings]:
    """Return the settings of each private run of a case, by its name."""
    if case == "apart":
        return {name: {**settings, "privacy.epsilon": APART_EPSILON} for name, settings in APART.items()}
    return {f"{epsilon:g}": {**PRIVATE[case], "privacy.epsilon": epsilon} for epsilon in epsilons}


def bars_of(case: str, seed: int, found: dict[str, Any]) -> Iterator[Bar]:
    """Yield what the runs of a case must reach."""
    if case == "apart":
        name = f"apart: accuracy with correlated noise beyond that with independent, seed {seed}"
        yield Bar.at_least(name, found["correlated"]["accuracy"] - found["independent"]["accuracy"], 0.0)
    elif (name := f"{BAR_EPSILON:g}") in found:
        bar = f"{case}: accuracy at epsilon {BAR_EPSILON:g}, seed {seed}"
        yield Bar.at_least(bar, found[name]["accuracy"], BARS[case])


def simulated(folder: Path, settings: Settings) -> dict[str, Any]:
    """Run one simulation, and return what it shows."""
    file = load_run(TASK, [f"{name}={value}" for name, value in settings.items()], kind=SimulationFile)
    lines: list[dict[str, Any]] = []
    with opened(file, task, folder, on_round=lines.append, is_fresh=True) as federation:
        began = time.process_time()
        result = federation.run()
        seconds = time.process_time() - began
    measured = [line["server"]["accuracy"] for line in lines if line.get("server")]
    account = result.get("privacy") or {}
    return {
        "accuracy": measured[-1],
        "versions": result["version"],
        "epsilon": account.get("epsilon"),
        "noise_multiplier": account.get("noise_multiplier"),
        "cpu_s": round(seconds, 2),
    }


def main() -> int:
    """Run the benchmark."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else "")
    parser.add_argument("--seeds", default="2,3")
    parser.add_argument("--cases", default=",".join(BASE))
    parser.add_argument("--epsilons", default="8,1")
    parser.add_argument("--set", action="append", default=[], metavar="NAME=VALUE", help="of every run, to try others")
    options = parser.parse_args()
    epsilons = [float(text) for text in options.epsilons.split(",")]
    more = dict(text.split("=", 1) for text in options.set)
    bars: list[Bar] = []
    ours: dict[str, Any] = {}
    for case in options.cases.split(","):
        for seed in map(int, options.seeds.split(",")):
            found: dict[str, Any] = {}
            private = budgets_of(case, epsilons)
            for name, budget in {"none": {}, **private}.items():
                given = {key: value for key, value in more.items() if name != "none" or not key.startswith("privacy.")}
                with tempfile.TemporaryDirectory() as folder:
                    settings = {**BASE[case], "seed": seed, **budget, **given}
                    found[name] = simulated(Path(folder) / "run", settings)
                say(json.dumps({"case": case, "seed": seed, "budget": name, **found[name]}))
            ours[f"{case}, seed {seed}"] = found
            for name, settings in private.items():
                of = f"{case}, {name}: epsilon spent, seed {seed}"
                bars.append(Bar.at_most(of, found[name]["epsilon"], settings["privacy.epsilon"]))
            bars += bars_of(case, seed, found)
    return conclude("private_utility", bars, ours=ours, theirs={})


if __name__ == "__main__":
    sys.exit(main())
