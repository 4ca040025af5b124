"""Li et al. 2020: FedProx where many devices are too slow for the work that a round asks for.

Synthetic(1, 1) and its IID twin of `examples/synthetic.py`: 30 devices, 10 in a round, E = 20, B = 10, lr 0.01. A
straggler would need four times as long as the others, and the deadline ends it with a quarter to a half of its steps
done. FedAvg drops what it hands in (`partial_work = "refuse"`), FedProx counts it, with and without the proximal term.
The paper has curves, no table: a check is a direction.

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
from atoll.simulations.experiments.tables.papers.paper import EXAMPLES, Paper

METRIC = "server/accuracy"
LAST = 20
"""Rounds at the end over which accuracy is averaged, and its deviation taken."""

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
    "round.retry": 10_000,  # a cohort of stragglers alone, all dropped, is drawn anew
    "simulation.engine": "batched",
}


def cell(data: str, share: float, method: str, **changes: Any) -> Cell:
    """One run of the table."""
    slow = {**SLOW, "devices.stragglers": share} if share else {}
    varied = {"data": data, "stragglers": f"{share:.0%}", "method": method}
    return Cell(varied, {**BASE, **slow, **METHODS[method], **changes}, DATA[data])


def cells() -> list[Cell]:
    """All of them; without stragglers nothing is partial, and FedProx with μ = 0 is FedAvg."""
    return [cell(data, share, method) for data in DATA for share in STRAGGLERS for method in _methods(share)]


def _methods(share: float) -> list[str]:
    return [method for method in METHODS if share or method != "FedProx, μ = 0"]


def accuracy(out: Path, one: Cell) -> tuple[float, float]:
    """On all devices' test data: mean and standard deviation over the last versions."""
    values = read_run(out / one.folder).curve(METRIC)[1][-LAST:]
    return statistics.fmean(values), statistics.pstdev(values)


def table(out: Path) -> str:
    """Accuracy of each method, by data and share of stragglers."""
    header = ["data", "stragglers", *METHODS]
    return markdown(header, ([data, f"{share:.0%}", *_line(out, data, share)] for data in DATA for share in STRAGGLERS))


def _line(out: Path, data: str, share: float) -> list[str]:
    found = {method: accuracy(out, cell(data, share, method)) for method in _methods(share)}
    return [
        f"{found[method][0]:.3f} ± {found[method][1]:.3f}" if method in found else "as FedAvg" for method in METHODS
    ]


PAPER = Paper("fedprox", cells(), table)
