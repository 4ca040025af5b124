"""An ensemble of trees under rule concatenate, against Flower's FedXgbBagging on the same data.

    python -m benchmarks.trees [--rounds 20] [--pairs 3] [--quick]

Four clinics of `examples/tumours.py` add a tree of XGBoost each in every round. Both sides are simulations with the
same records, parameters and rounds, and take turns; Flower's has the best of a printed sweep of the clients that train
at once. Compared are the ensembles, tree by tree, the AUC on records that no clinic has, seconds a round (without the
first, in which a simulation starts), and bytes. A pair takes a minute, so there are three. `make peers` installs
Flower; without it, and with --quick, XGBoost's own functions alone make the other ensemble.
"""

import argparse
import json
import os
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from itertools import pairwise
from pathlib import Path
from statistics import median
from typing import Any

import numpy as np
import xgboost
from sklearn.metrics import roc_auc_score

from atoll.task.task import load_task
from atoll.tensors import safetensors_file
from benchmarks.processes import ROOT
from benchmarks.report import Bar, conclude, say, spread
from examples.tumours import CLINICS, records

PEERS = ROOT / ".venv-peers" / "bin"
TOML = ROOT / "examples" / "tumours_xgboost.toml"
PARAMETERS = {
    "objective": "binary:logistic",
    "base_score": 0.5,
    "max_depth": 4,
    "eta": 0.3,
    "tree_method": "hist",
    "nthread": 1,
}
NAMES = sorted(CLINICS)
"""The clinics, in the order in which both sides append their trees."""

Json = dict[str, Any]


def ours(folder: Path, rounds: int) -> Json:
    """Simulate the example's run; return its booster, the seconds of each round but the first, and the bytes."""
    given = (f"rounds={rounds}", "evaluation.server_every=0", "evaluation.clients_every=0")
    toml = folder / "run.toml"  # neither side evaluates
    toml.write_text(TOML.read_text().partition("[evaluation]")[0].replace('task = "', f'task = "{TOML.parent}/'))
    command = [str(Path(sys.executable).with_name("atoll")), "simulate", str(toml), "--out", str(folder / "out")]
    options = [part for setting in given for part in ("--set", setting)]
    environment = {**os.environ, "OMP_NUM_THREADS": "1"}
    done = subprocess.run([*command, *options], env=environment, capture_output=True, text=True, check=False)
    if done.returncode:
        raise SystemExit(f"atoll simulate: {done.stderr[-2000:]}")
    lines = [json.loads(line) for line in (folder / "out" / "rounds.jsonl").read_text().splitlines()]
    model = safetensors_file.read(folder / "out" / "models" / "versions" / f"{rounds:06d}.safetensors")
    booster_of = sys.modules[type(load_task(f"{ROOT}/examples/tumours_xgboost.py:task")).__module__].booster_of
    return {
        "booster": booster_of(model),
        "seconds": [after["real_s"] - before["real_s"] for before, after in pairwise(lines)],
        "down": lines[-1]["bytes_down"],
        "up": lines[-1]["bytes_up"],
    }


def flowers(folder: Path, rounds: int, cpus: float) -> Json:
    """Run FedXgbBagging in Flower's simulation; return the same."""
    folder.mkdir()
    arrays = {}
    for number, name in enumerate(NAMES):
        arrays[f"features{number}"], arrays[f"labels{number}"] = records("train", name)
    np.savez(folder / "clients.npz", **arrays)  # type: ignore[arg-type]
    settings = {"parameters": PARAMETERS, "rounds": rounds, "clients": len(NAMES)}
    (folder / "settings.json").write_text(json.dumps(settings))
    command = [str(PEERS / "python"), "-m", "benchmarks.peer_trees", str(folder), str(cpus)]
    environment = {**os.environ, "PYTHONPATH": str(ROOT), "FLWR_TELEMETRY_ENABLED": "0", "OMP_NUM_THREADS": "1"}
    done = subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True, timeout=600, check=False)
    if not (folder / "model.json").exists():
        raise SystemExit(f"Flower: {done.stderr[-2000:]}")
    ends = json.loads((folder / "rounds.json").read_text())
    return {
        "booster": xgboost.Booster(model_file=folder / "model.json"),
        "seconds": [after["at"] - before["at"] for before, after in pairwise(ends)],
        "down": sum(end["down"] for end in ends),
        "up": sum(end["up"] for end in ends),
    }


def by_hand(rounds: int) -> xgboost.Booster:
    """Return the ensemble that XGBoost's own functions make: boost, slice off the new tree, append."""
    data = {name: xgboost.DMatrix(*records("train", name)) for name in NAMES}
    document = json.loads(xgboost.train(PARAMETERS, data[NAMES[0]], 0).save_raw("json"))
    model = document["learner"]["gradient_booster"]["model"]
    for _ in range(rounds):
        start, added = bytearray(json.dumps(document).encode()), []
        for name in NAMES:
            booster = xgboost.Booster(PARAMETERS)
            booster.load_model(start)
            booster.update(data[name], booster.num_boosted_rounds())
            added.append(trees_of(booster)[-1])
        for tree in added:
            model["trees"].append({**tree, "id": len(model["trees"])})
            model["tree_info"].append(0)
            model["iteration_indptr"].append(len(model["trees"]))
        model["gbtree_model_param"]["num_trees"] = str(len(model["trees"]))
    booster = xgboost.Booster()
    booster.load_model(bytearray(json.dumps(document).encode()))
    return booster


def trees_of(booster: xgboost.Booster) -> list[Json]:
    """Return the trees in XGBoost's own JSON, every number of every node."""
    trees: list[Json] = json.loads(booster.save_raw("json"))["learner"]["gradient_booster"]["model"]["trees"]
    return trees


def differing(one: xgboost.Booster, other: xgboost.Booster) -> int:
    """Return the number of trees in which two ensembles differ, in any number of any node."""
    mine, theirs = trees_of(one), trees_of(other)
    alike = sum(tree == twin for tree, twin in zip(mine, theirs, strict=False))
    return max(len(mine), len(theirs)) - alike


def auc(booster: xgboost.Booster) -> float:
    """Return the AUC on the server's records."""
    features, labels = records("server", None)
    return float(roc_auc_score(labels, booster.predict(xgboost.DMatrix(features))))


def figures(runs: Sequence[Json]) -> Json:
    """Return the figures of one side over its runs."""
    one = runs[-1]
    return {
        "round_s": spread([second for run in runs for second in run["seconds"]], 4),
        "bytes_down": one["down"],
        "bytes_up": one["up"],
        "auc": round(auc(one["booster"]), 4),
        "trees": len(trees_of(one["booster"])),
    }


def sweep(folder: Path, rounds: int) -> tuple[float, Json]:
    """Return the processors of a client with which Flower's rounds are shortest, and the seconds of each."""
    found = {}
    for cpus in (1.0, 0.5):
        found[cpus] = median(flowers(folder / f"sweep{cpus}", rounds, cpus)["seconds"])
        say(f"sweep: Flower, {cpus:g} processors for a client: {found[cpus]:.3f} s a round")
    return min(found, key=lambda cpus: found[cpus]), {f"{cpus:g} CPUs": round(s, 4) for cpus, s in found.items()}


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.trees", description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--rounds", type=int, default=20)
    parser.add_argument("--pairs", type=int, default=3)
    parser.add_argument("--quick", action="store_true", help="five rounds, one turn, without Flower")
    given = parser.parse_args(arguments)
    if given.quick:
        given.rounds, given.pairs = 5, 1
    why_not = "left out by --quick" if given.quick else "" if (PEERS / "ray").exists() else "run `make peers` first"
    mine, theirs, swept = list[Json](), list[Json](), None
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        cpus, swept = (1.0, None) if why_not else sweep(folder, 5)
        for number in range(given.pairs):
            (folder / f"ours{number}").mkdir()
            mine.append(ours(folder / f"ours{number}", given.rounds))
            say(f"pair {number + 1}: Atoll, {median(mine[-1]['seconds']):.3f} s a round")
            if not why_not:
                theirs.append(flowers(folder / f"theirs{number}", given.rounds, cpus))
                say(f"pair {number + 1}: Flower, {median(theirs[-1]['seconds']):.3f} s a round")
    bars = [
        Bar.exactly("trees that differ from XGBoost's own", differing(mine[-1]["booster"], by_hand(given.rounds)), 0)
    ]
    if theirs:
        twin = theirs[-1]
        speed = median(median(b["seconds"]) / median(a["seconds"]) for a, b in zip(mine, theirs, strict=True))
        sent = (twin["down"] + twin["up"]) / (mine[-1]["down"] + mine[-1]["up"])
        bars += [
            Bar.exactly("trees that differ from Flower's", differing(mine[-1]["booster"], twin["booster"]), 0),
            Bar.exactly("AUC less Flower's", auc(mine[-1]["booster"]) - auc(twin["booster"]), 0),
            Bar.at_least("Flower's seconds a round, times ours", speed, 1.0),
            Bar.at_least("Flower's bytes, times ours", sent, 2.0),
        ]
    what = {"rounds": given.rounds, "pairs": given.pairs, "clients": len(NAMES)}
    other = {**figures(theirs), "sweep": swept} if theirs else None
    return conclude("trees", bars, ours={**what, **figures(mine)}, theirs=other, why_not=why_not)


if __name__ == "__main__":
    raise SystemExit(main())
