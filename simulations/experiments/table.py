"""The table of a sweep: a row for each cell, or the mean ± deviation of all cells that differ in the seed alone."""

import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from atoll.protocol.settings import ConfigError
from atoll.simulations.experiments.grid import Cell
from atoll.simulations.experiments.report import RunReport


@dataclass(frozen=True, slots=True)
class Objective:
    """The metric of a table and its target."""

    metric: str
    """Name of the metric, WHO/METRIC."""
    target: float | None = None


Measure = Callable[[RunReport, Objective], float | None]


def _to_target(axis: str) -> Measure:
    def measure(report: RunReport, objective: Objective) -> float | None:
        reached = None if objective.target is None else report.reached(objective.metric, objective.target)
        return None if reached is None else float(getattr(reached, axis))

    return measure


def _fairness(of: Callable[[Any], float]) -> Measure:
    def measure(report: RunReport, objective: Objective) -> float | None:
        fairness = report.fairness(objective.metric.partition("/")[2])
        return None if fairness is None else of(fairness)

    return measure


def _per_round(fate: str) -> Measure:
    def measure(report: RunReport, _: Objective) -> float | None:
        return sum(report.participation(fate)) / len(report.rounds) if report.rounds else None

    return measure


def _total(name: str) -> Measure:
    def measure(report: RunReport, _: Objective) -> float | None:
        return float(report.rounds[-1][name]) if report.rounds else None

    return measure


COLUMNS: Mapping[str, Measure] = {
    "final": lambda report, objective: report.last(objective.metric),
    "best": lambda report, objective: report.best(objective.metric),
    "rounds": lambda report, _: float(len(report.rounds)),
    "virtual_s": _total("virtual_s"),
    "real_s": _total("real_s"),
    "bytes": lambda report, _: float(report.bytes),
    "bytes_up": _total("bytes_up"),
    "rounds_to_target": _to_target("round"),
    "virtual_s_to_target": _to_target("virtual_s"),
    "real_s_to_target": _to_target("real_s"),
    "bytes_to_target": _to_target("bytes"),
    "bytes_up_to_target": _to_target("bytes_up"),
    "counted": _per_round("counted"),
    "stragglers": _per_round("stragglers"),
    "lost": _per_round("lost"),
    "worst_tenth": _fairness(lambda fairness: fairness.percentile(0.1)),
    "variance": _fairness(lambda fairness: fairness.variance),
}
"""Functions that compute a column's value of a run: clients per round on average; the last two on the clients' data."""

PLAIN = ("final", "best", "rounds", "virtual_s", "bytes")
WITH_TARGET = ("final", "best", "rounds_to_target", "virtual_s_to_target", "bytes_to_target")


@dataclass(frozen=True, slots=True)
class Mean:
    """The mean of a value over several runs."""

    mean: float | None
    """Mean over the runs that have the value; None: no run has it."""
    std: float | None
    """Sample standard deviation, with n - 1; None for fewer than two."""
    n: int
    """Number of runs that have the value."""
    of: int
    """Number of all runs."""

    def __str__(self) -> str:
        if self.mean is None:
            return "-"
        spread = "" if self.std is None else f" ± {number(self.std)}"
        return f"{number(self.mean)}{spread}" + (f" ({self.n} of {self.of})" if self.n < self.of else "")


def mean_of(values: Sequence[float | None]) -> Mean:
    """Compute mean and sample deviation of the values that are not None."""
    present = [value for value in values if value is not None]
    if not present:
        return Mean(None, None, 0, len(values))
    mean = math.fsum(present) / len(present)
    squares = math.fsum((value - mean) ** 2 for value in present)
    std = math.sqrt(squares / (len(present) - 1)) if len(present) > 1 else None
    return Mean(mean, std, len(present), len(values))


@dataclass(frozen=True, slots=True)
class Row:
    """One row: the labels of the varied settings, and the values of the columns."""

    varied: Mapping[str, str]
    values: Mapping[str, Mean]
    state: str
    """State of the first cell that is not finished, or "finished"."""


def chosen(columns: Sequence[str] | None, target: float | None) -> tuple[str, ...]:
    """Return the given columns, or the default ones.

    Raises:
        ConfigError: a column is unknown (the message lists all), or needs a target.
    """
    if columns is None:
        return PLAIN if target is None else WITH_TARGET
    if wrong := [name for name in columns if name not in COLUMNS]:
        raise ConfigError([f"column {name}: unknown (known: {', '.join(COLUMNS)})" for name in wrong])
    if target is None and (wrong := [name for name in columns if name.endswith("_to_target")]):
        raise ConfigError([f"column {name}: needs a target; set sweep.target" for name in wrong])
    return tuple(columns)


def rows(
    runs: Iterable[tuple[Cell, RunReport | None, str]], objective: Objective, columns: Sequence[str], over: list[str]
) -> list[Row]:
    """Return the rows, in the order of the cells.

    Args:
        runs: each cell with its report, if there is one, and its state.
        objective: the metric and the target.
        columns: names of `COLUMNS`.
        over: the varied settings to average over, such as the seed.
    """
    groups: dict[tuple[tuple[str, str], ...], list[tuple[RunReport | None, str]]] = {}
    for cell, report, state in runs:
        groups.setdefault(cell.without(over), []).append((report, state))
    return [
        Row(
            dict(varied),
            {name: mean_of([_value(COLUMNS[name], report, objective) for report, _ in members]) for name in columns},
            next((state for _, state in members if state != "finished"), "finished"),
        )
        for varied, members in groups.items()
    ]


def _value(measure: Measure, report: RunReport | None, objective: Objective) -> float | None:
    return None if report is None else measure(report, objective)


def markdown(header: Sequence[str], lines: Iterable[Sequence[object]]) -> str:
    """Return a table in Markdown."""
    body = [[str(cell).replace("|", "\\|") for cell in line] for line in lines]
    return "\n".join(f"| {' | '.join(line)} |" for line in [list(header), ["---"] * len(header), *body])


def number(value: float) -> str:
    """Format a number with four significant digits; whole numbers in full."""
    return f"{value:,.0f}" if value == int(value) or abs(value) >= 10_000 else f"{value:.4g}"
