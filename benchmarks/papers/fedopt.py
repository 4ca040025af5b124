"""Reddi et al. 2021: FedAdam against FedAvg with two kinds of label at each client.

scikit-learn's digits are dealt to 50 clients in shards, with ten clients in a round. Both methods are tuned as in the
paper, on a grid of client and server learning rates, by the mean training loss of the last rounds; the table has the
test accuracy of that run. The paper's tasks are larger; its claim is that adaptive server optimizers do at least as
well as FedAvg.

Source:
    "Adaptive Federated Optimization", ICLR 2021 (arXiv 2003.00295), section 5 and table 1; tau = 1e-3 of appendix D.
"""

import statistics
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from atoll.simulations.experiments.bands import mean_of
from atoll.simulations.experiments.grid import Cell
from atoll.simulations.experiments.report import RunReport, read_run
from atoll.simulations.experiments.table import markdown
from benchmarks.papers.paper import Paper

TASK = "benchmarks.papers.digits:task"
LAST = 20
SEEDS = (1, 2, 3)
CLIENT_RATES = (0.1, 0.3, 1.0)
METHODS: Mapping[str, tuple[float, ...]] = {"fedavg": (1.0,), "fedavgm": (0.3, 1.0), "fedadam": (0.01, 0.03, 0.1)}
"""Learning rates of the server that are tried, by server optimizer."""

BASE: Mapping[str, Any] = {
    "rounds": 100,
    "population.kind": "shards",
    "population.clients": 50,
    "round.cohort_size": 10,
    "local.epochs": 5,
    "simulation.engine": "batched",
}


def cell(method: str, client_rate: float, server_rate: float, seed: int, **changes: Any) -> Cell:
    """Return one run of the grid."""
    varied = {"optimizer": method, "client": f"{client_rate:g}", "server": f"{server_rate:g}", "seed": str(seed)}
    chosen = {"optimizer.name": method, "optimizer.lr": server_rate, "local.lr": client_rate, "seed": seed}
    return Cell(varied, {**BASE, **chosen, **changes}, TASK)


def grid(method: str) -> list[tuple[float, float]]:
    """Return the pairs of client's and server's rates that are tried."""
    return [(client, server) for client in CLIENT_RATES for server in METHODS[method]]


def cells() -> list[Cell]:
    """Return all runs of the grid."""
    return [cell(method, *rates, seed) for method in METHODS for rates in grid(method) for seed in SEEDS]


def last(report: RunReport, metric: str) -> float:
    """Compute the mean of a metric over the last rounds."""
    return statistics.fmean(report.curve(metric)[1][-LAST:])


def table(out: Path) -> str:
    """Return the table, with each optimizer at its best rates."""
    return markdown(
        [
            "server optimizer",
            "client lr",
            "server lr",
            "training loss",
            "test accuracy, last 20 rounds",
            "its deviation",
        ],
        (_line(out, method) for method in METHODS),
    )


def _line(out: Path, method: str) -> list[object]:
    reports = {rates: [read_run(out / cell(method, *rates, seed).folder) for seed in SEEDS] for rates in grid(method)}
    losses = {rates: statistics.fmean(last(one, "train/loss") for one in found) for rates, found in reports.items()}
    best = min(losses, key=losses.__getitem__)
    accuracies = [one.curve("server/accuracy")[1][-LAST:] for one in reports[best]]
    means = mean_of([statistics.fmean(values) for values in accuracies])
    wobble = statistics.fmean(statistics.pstdev(values) for values in accuracies)
    return [method, f"{best[0]:g}", f"{best[1]:g}", f"{losses[best]:.4f}", str(means), f"{wobble:.4f}"]


PAPER = Paper("fedopt", cells(), table)
