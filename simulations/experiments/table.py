"""A sweep as a table: a row for each cell, or for all that differ in nothing but the seed, as mean ± deviation."""

import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from atoll.protocol.settings import ConfigError
from atoll.simulations.experiments.grid import Cell
from atoll.simulations.experiments.report import RunReport


@dataclass(frozen=True, slots=True)
class Asked:
    """What a table is about."""

    metric: str
    """WHO/METRIC."""
    target: float | None = None


Measure = Callable[[RunReport, Asked], float | None]


def _to_target(axis: str) -> Measure:
    def measure(report: RunReport, asked: Asked) -> float | None:
        reached = None if asked.target is None else report.reached(asked.metric, asked.target)
        return None if reached is None else float(getattr(reached, axis))

    return measure


def _fairness(of: Callable[[Any], float]) -> Measure:
    def measure(report: RunReport, asked: Asked) -> float | None:
        found = report.fairness(asked.metric.partition("/")[2])
        return None if found is None else of(found)

    return measure


def _per_round(fate: str) -> Measure:
    def measure(report: RunReport, _asked: Asked) -> float | None:
        return sum(report.participation(fate)) / len(report.rounds) if report.rounds else None

    return measure


def _total(name: str) -> Measure:
    def measure(report: RunReport, _asked: Asked) -> float | None:
        return float(report.rounds[-1][name]) if report.rounds else None

    return measure


COLUMNS: Mapping[str, Measure] = {
    "final": lambda report, asked: report.last(asked.metric),
    "best": lambda report, asked: report.best(asked.metric),
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
    "worst_tenth": _fairness(lambda found: found.percentile(0.1)),
    "variance": _fairness(lambda found: found.variance),
}
"""What a column shows of a run; the last three of rounds on average, and of the clients' own data."""

PLAIN = ("final", "best", "rounds", "virtual_s", "bytes")
WITH_TARGET = ("final", "best", "rounds_to_target", "virtual_s_to_target", "bytes_to_target")


@dataclass(frozen=True, slots=True)
class Mean:
    """Of several runs."""

    mean: float | None
    """Over those that have the value; None: none has."""
    std: float | None
    """Over n - 1; None for fewer than two."""
    n: int
    """How many have the value."""
    of: int
    """How many there are."""

    def __str__(self) -> str:
        if self.mean is None:
            return "-"
        spread = "" if self.std is None else f" ± {number(self.std)}"
        return f"{number(self.mean)}{spread}" + (f" ({self.n} of {self.of})" if self.n < self.of else "")


def mean_of(values: Sequence[float | None]) -> Mean:
    """Mean and sample deviation of those that are there."""
    there = [value for value in values if value is not None]
    if not there:
        return Mean(None, None, 0, len(values))
    mean = math.fsum(there) / len(there)
    squares = math.fsum((value - mean) ** 2 for value in there)
    return Mean(mean, math.sqrt(squares / (len(there) - 1)) if len(there) > 1 else None, len(there), len(values))


@dataclass(frozen=True, slots=True)
class Row:
    """One row: what varies, and what came of it."""

    varied: Mapping[str, str]
    values: Mapping[str, Mean]
    state: str
    """finished, or of the first cell that is not: its state"""


def chosen(columns: Sequence[str] | None, target: float | None) -> tuple[str, ...]:
    """The columns that were asked for, or those that suit.

    Raises:
        ConfigError: there is no such column; all of them are listed.
    """
    if columns is None:
        return PLAIN if target is None else WITH_TARGET
    if wrong := [name for name in columns if name not in COLUMNS]:
        raise ConfigError([f"column {name}: unknown (known: {', '.join(COLUMNS)})" for name in wrong])
    if target is None and (wrong := [name for name in columns if name.endswith("_to_target")]):
        raise ConfigError([f"column {name}: needs a target" for name in wrong])
    return tuple(columns)


def rows(
    runs: Iterable[tuple[Cell, RunReport | None, str]], asked: Asked, columns: Sequence[str], over: list[str]
) -> list[Row]:
    """The rows, in the order of the cells.

    Args:
        runs: each cell with its report, if there is one, and its state.
        asked: the metric and the target.
        columns: of `COLUMNS`.
        over: what is averaged over, such as the seed.
    """
    groups: dict[tuple[tuple[str, str], ...], list[tuple[RunReport | None, str]]] = {}
    for cell, report, state in runs:
        groups.setdefault(cell.without(over), []).append((report, state))
    return [
        Row(
            dict(varied),
            {name: mean_of([_measured(COLUMNS[name], report, asked) for report, _ in members]) for name in columns},
            next((state for _, state in members if state != "finished"), "finished"),
        )
        for varied, members in groups.items()
    ]


def _measured(measure: Measure, report: RunReport | None, asked: Asked) -> float | None:
    return None if report is None else measure(report, asked)


def markdown(header: Sequence[str], lines: Iterable[Sequence[object]]) -> str:
    """A table for a page of documentation."""
    body = [[str(cell).replace("|", "\\|") for cell in line] for line in lines]
    return "\n".join(f"| {' | '.join(line)} |" for line in [list(header), ["---"] * len(header), *body])


def number(value: float) -> str:
    """Four digits that matter; whole numbers as they are."""
    return f"{value:,.0f}" if value == int(value) or abs(value) >= 10_000 else f"{value:.4g}"
