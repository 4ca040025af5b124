"""McMahan et al. 2017: communication rounds to a target accuracy on MNIST, the paper's numbers beside ours.

100 clients of 600 examples: IID, or sorted by digit, cut into 200 shards and dealt two to each client. A round trains a
fraction C of the clients for E epochs with batches of B. The paper tuned the learning rate of every cell; here each
model and batch size has one rate, so some cells are slower. One cell has a rate of its own, without which it would not
reach the target.

Source:
    "Communication-Efficient Learning of Deep Networks from Decentralized Data", AISTATS 2017, tables 1 (2NN) and 2
    (CNN).
"""

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from atoll.simulations.experiments.bands import number
from atoll.simulations.experiments.grid import Cell
from atoll.simulations.experiments.report import read_run
from atoll.simulations.experiments.table import markdown
from benchmarks.papers.goal import Goal
from benchmarks.papers.paper import EXAMPLES, Paper
from benchmarks.papers.process_pool import is_over

CLIENTS, EXAMPLES_EACH = 100, 600
METRIC = "server/accuracy"
MARGIN = 2.0
"""Maximum rounds of a run, relative to the paper's, until the target counts as not reached."""

SPLITS: Mapping[str, Mapping[str, Any]] = {"IID": {"population.kind": "iid"}, "shards": {"population.kind": "shards"}}
TARGETS = {"2NN": 0.97, "CNN": 0.99}
TASKS = {"2NN": f"{EXAMPLES}/mnist.py:task", "CNN": f"{EXAMPLES}/mnist.py:cnn"}
WHOLE = "∞"
"""Batch size B of all of a client's examples."""
RATES = {("2NN", "10"): 0.1, ("2NN", WHOLE): 0.5, ("CNN", "10"): 0.2, ("CNN", "50"): 0.3}
OF_ONE_SHARDS_CLIENT = 0.2
"""Learning rate for rounds of one client with one batch of two digits, in which 0.5 unlearns the round before."""


@dataclass(frozen=True, slots=True)
class Entry:
    """One number of the paper."""

    model: str
    cohort: int
    epochs: int
    batch: str
    split: str
    rounds: int

    @property
    def steps(self) -> int:
        """The local steps of a client in a round, the paper's u."""
        size = EXAMPLES_EACH if self.batch == WHOLE else int(self.batch)
        return self.epochs * EXAMPLES_EACH // size

    @property
    def rate(self) -> float:
        """The client's learning rate."""
        is_alone = (self.cohort, self.batch, self.split) == (1, WHOLE, "shards")
        return OF_ONE_SHARDS_CLIENT if is_alone else RATES[self.model, self.batch]

    @property
    def cell(self) -> Cell:
        """The run that repeats this number."""
        varied = {
            "model": self.model,
            "clients": str(self.cohort),
            "E": str(self.epochs),
            "B": self.batch.replace(WHOLE, "all"),
            "split": self.split,
        }
        settings = {
            "rounds": int(self.rounds * MARGIN) + 1,
            "seed": 1,
            "population.clients": CLIENTS,
            "round.cohort_size": self.cohort,
            "local.epochs": self.epochs,
            "local.batch_size": EXAMPLES_EACH if self.batch == WHOLE else int(self.batch),
            "local.lr": self.rate,
            "simulation.engine": "batched",
            **SPLITS[self.split],
        }
        return Cell(varied, settings, TASKS[self.model])


TABLE_1 = {
    (1, WHOLE): (1455, 4278),
    (1, "10"): (316, 3275),
    (10, WHOLE): (1474, 1796),
    (10, "10"): (87, 664),
    (20, WHOLE): (1658, 1528),
    (20, "10"): (77, 619),
    (50, "10"): (75, 443),
    (100, "10"): (70, 380),
}
"""Rounds of the 2NN with E = 1 to 0.97, IID and shards, by (clients in a round, B), as far as the paper reached it."""

TABLE_2 = {(1, "10"): (34, 350), (1, "50"): (65, 600), (5, "50"): (29, 334)}
"""Rounds of the CNN with C = 0.1 to 0.99, IID and shards, by (E, B)."""


def entries() -> Iterator[Entry]:
    """Yield all entries that take minutes on two cores; the CNN on shards, which takes an hour each, is left out."""
    for (cohort, batch), both in TABLE_1.items():
        yield from (Entry("2NN", cohort, 1, batch, split, rounds) for split, rounds in zip(SPLITS, both, strict=True))
    for (epochs, batch), (iid, _) in TABLE_2.items():
        yield Entry("CNN", 10, epochs, batch, "IID", iid)


def goal_of(cell: Cell) -> Goal:
    """Return the paper's target accuracy for the cell's model."""
    return Goal(METRIC, TARGETS[cell.varied["model"]])


def table(out: Path) -> str:
    """Return the table of the paper's rounds and ours."""
    header = ["model", "target", "C", "E", "B", "u", "split", "lr", "rounds: paper", "ours", "ours / paper", "best"]
    return markdown(header, (_line(entry, out) for entry in entries()))


def _line(entry: Entry, out: Path) -> list[object]:
    return [
        entry.model,
        TARGETS[entry.model],
        "1 client" if entry.cohort == 1 else f"{entry.cohort / CLIENTS:g}",
        entry.epochs,
        entry.batch,
        entry.steps,
        entry.split,
        entry.rate,
        entry.rounds,
        *_ours(entry, out / entry.cell.folder),
    ]


def _ours(entry: Entry, folder: Path) -> list[str]:
    """Return our rounds, their ratio to the paper's and the best accuracy, or "not run yet"."""
    goal = goal_of(entry.cell)
    if not is_over(folder, goal):
        return ["not run yet", "-", "-"]
    report = read_run(folder)
    rounds, best = goal.rounds_of(report), f"{report.best(METRIC):.4f}"
    if rounds is None:
        return [f"not in {len(report.rounds)}", "-", best]
    return [number(round(rounds, 1)), f"{rounds / entry.rounds:.2f}", best]


PAPER = Paper("mcmahan", [entry.cell for entry in entries()], table, goal_of)
