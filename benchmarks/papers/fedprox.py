"""Li et al. 2020: FedProx with many devices that are too slow for the work of a round.

Synthetic(1, 1) and its IID variant of `examples/synthetic.py`: 30 devices, 10 in a round, E = 20, B = 10, lr 0.01. A
straggler would need four times as long as the others; the deadline stops it after a quarter to a half of its steps.
FedAvg drops its update (`partial_work = "refuse"`), FedProx counts it, with and without the proximal term. The paper
has curves and no table, so only directions can be checked.

Source:
    "Federated Optimization in Heterogeneous Networks", MLSys 2020 (arXiv 1812.06127), section 5.2 and figure 1.
"""

import statistics
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from atoll.simulations.experiments.grid import Cell
from atoll.simulations.experiments.report import read_run
from atoll.simulations.experiments.table import markdown
from benchmarks.papers.paper import EXAMPLES, Paper

METRIC = "server/accuracy"
LAST = 20
"""Number of last rounds for the mean and the deviation of accuracy."""

DATA = {"Synthetic(1, 1)": f"{EXAMPLES}/synthetic.py:task", "IID": f"{EXAMPLES}/synthetic.py:iid"}
STRAGGLERS = (0.0, 0.5, 0.9)
METHODS: Mapping[str, Mapping[str, Any]] = {
    "FedAvg, stragglers dropped": {"round.partial_work": "refuse"},
    "FedProx, μ = 0": {"round.partial_work": "accept"},
    "FedProx, μ = 1": {"round.partial_work": "accept", "local.prox_mu": 1.0},
}
SLOW: Mapping[str, Any] = {
    "devices.seconds_per_round.low": 5.0,
    "devices.seconds_per_round.high": 10.0,
    "devices.slowdown": 4.0,
    "round.deadline": 11.0,
}
BASE: Mapping[str, Any] = {
    "rounds": 100,
    "seed": 1,
    "round.cohort_size": 10,
    "round.quorum": 1,
    "round.retry": 10_000,  # a cohort of stragglers alone, which are all dropped, is drawn anew
    "simulation.engine": "batched",
}


def cell(data: str, share: float, method: str, **changes: Any) -> Cell:
    """Return one run of the table."""
    slow = {**SLOW, "devices.stragglers": share} if share else {}
    varied = {"data": data, "stragglers": f"{share:.0%}", "method": method}
    return Cell(varied, {**BASE, **slow, **METHODS[method], **changes}, DATA[data])


def cells() -> list[Cell]:
    """Return all runs of the table; without stragglers no work is partial, and FedProx with μ = 0 is FedAvg."""
    return [cell(data, share, method) for data in DATA for share in STRAGGLERS for method in _methods(share)]


def _methods(share: float) -> list[str]:
    return [method for method in METHODS if share or method != "FedProx, μ = 0"]


def accuracy(out: Path, one: Cell) -> tuple[float, float]:
    """Compute mean and standard deviation of the accuracy on all devices' test data over the last versions."""
    values = read_run(out / one.folder).curve(METRIC)[1][-LAST:]
    return statistics.fmean(values), statistics.pstdev(values)


def table(out: Path) -> str:
    """Return the table: the accuracy of each method, by data and share of stragglers."""
    header = ["data", "stragglers", *METHODS]
    return markdown(header, ([data, f"{share:.0%}", *_line(out, data, share)] for data in DATA for share in STRAGGLERS))


def _line(out: Path, data: str, share: float) -> list[str]:
    accuracies = {method: accuracy(out, cell(data, share, method)) for method in _methods(share)}
    texts = {method: f"{mean:.3f} ± {deviation:.3f}" for method, (mean, deviation) in accuracies.items()}
    return [texts.get(method, "as FedAvg") for method in METHODS]


PAPER = Paper("fedprox", cells(), table)
