"""The table of a sweep: a row for each cell, or the mean ± deviation of all cells that differ only in the seed."""

import csv
import io
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

from atoll.protocol.settings import ConfigError
from atoll.simulations.experiments.bands import AXES, Curve, Mean, largest_common, mean_of
from atoll.simulations.experiments.grid import Cell
from atoll.simulations.experiments.report import RunReport


@dataclass(frozen=True, slots=True)
class Objective:
    """Metric of a table and its target."""

    metric: str
    """Name of the metric, WHO/METRIC."""
    target: float | None = None
    by: str | None = None
    """Axis of a comparison, one of `bands.AXES`."""
    common: float | None = None
    """Last position on this axis at which every run has a value."""


Measure = Callable[[RunReport, Objective], float | None]


def _to_target(axis: str) -> Measure:
    def measure(report: RunReport, objective: Objective) -> float | None:
        reached = None if objective.target is None else report.reached(objective.metric, objective.target)
        return None if reached is None else float(getattr(reached, axis))

    return measure


def _fairness(of: Callable[[Any], float]) -> Measure:
    def measure(report: RunReport, objective: Objective) -> float | None:
        fairness = report.over_clients(objective.metric.partition("/")[2])
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


def _at_common(report: RunReport, objective: Objective) -> float | None:
    if objective.by is None or objective.common is None:
        return None
    return Curve(*report.curve(objective.metric, AXES[objective.by].axis)).at(objective.common)


COLUMNS: Mapping[str, Measure] = {
    "final": lambda report, objective: report.last(objective.metric),
    "best": lambda report, objective: report.best(objective.metric),
    "at_common": _at_common,
    "rounds": lambda report, _: float(len(report.rounds)),
    "updates": lambda report, _: float(report.updates),
    "virtual_s": _total("virtual_s"),
    "real_s": _total("real_s"),
    "bytes": lambda report, _: float(report.bytes),
    "bytes_up": _total("bytes_up"),
    "rounds_to_target": _to_target("round"),
    "updates_to_target": _to_target("updates"),
    "virtual_s_to_target": _to_target("virtual_s"),
    "real_s_to_target": _to_target("real_s"),
    "bytes_to_target": _to_target("bytes"),
    "bytes_up_to_target": _to_target("bytes_up"),
    "counted": _per_round("counted"),
    "stragglers": _per_round("stragglers"),
    "lost": _per_round("lost"),
    "worst_tenth": _fairness(lambda fairness: fairness.percentile(0.1)),
    "variance": _fairness(lambda fairness: fairness.variance),
    "epsilon": lambda report, _: report.epsilon,
}
"""Functions that compute a column's value of a run: clients per round on average; `worst_tenth` and `variance` on the
clients' data; the epsilon of a private run, as spent, which is no guarantee."""

OF_A_METRIC = ("final", "best", "worst_tenth", "variance")
"""Columns that may refer to another metric than the table's."""

PLAIN = ("final", "best", "rounds", "virtual_s", "bytes")
WITH_TARGET = ("final", "best", "rounds_to_target", "virtual_s_to_target", "bytes_to_target")


@dataclass(frozen=True, slots=True)
class Row:
    """Row of the table: the labels of the varied settings, and the values of the columns."""

    varied: Mapping[str, str]
    values: Mapping[str, Mean]
    state: str
    """State of the first cell that is not finished, or "finished"."""
    over: Mapping[str, tuple[str, ...]] = field(default_factory=dict)
    """Labels of the varied settings that are averaged over, such as the seeds, for the runs that have a report."""


def chosen(columns: Sequence[str] | None, target: float | None, by: str | None = None) -> tuple[str, ...]:
    """Return the given columns, or the default ones.

    Args:
        columns: names of `COLUMNS`, each perhaps with @GROUP/NAME for another metric; None: the default ones.
        target: the target of the table's metric.
        by: the axis of a comparison, one of `bands.AXES`.

    Raises:
        ConfigError: a column is unknown (the message lists all), or needs a target or an axis.
    """
    if columns is None and by is not None:
        return ("at_common", *([] if target is None else [AXES[by].to_target]), "final", "best")
    if columns is None:
        return PLAIN if target is None else WITH_TARGET
    if faults := [fault for column in columns if (fault := _fault_of(column, target, by))]:
        raise ConfigError(faults)
    return tuple(columns)


def _fault_of(column: str, target: float | None, by: str | None) -> str:
    """Return the fault of a column; empty: none."""
    name, at, metric = column.partition("@")
    if name not in COLUMNS:
        return f"column {name}: unknown (known: {', '.join(COLUMNS)})"
    if at and (name not in OF_A_METRIC or "/" not in metric):
        return f"column {column}: allowed: COLUMN@GROUP/NAME, where COLUMN is one of {', '.join(OF_A_METRIC)}"
    if target is None and name.endswith("_to_target"):
        return f"column {name}: needs a target; set sweep.target"
    if by is None and name == "at_common":
        return f"column {name}: needs an axis; add --by, one of {', '.join(AXES)}"
    return ""


def compared(objective: Objective, reports: Iterable[RunReport]) -> Objective:
    """Return the objective with the last position of its axis at which every run has a value."""
    if objective.by is None:
        return objective
    axis = AXES[objective.by].axis
    common = largest_common(Curve(*report.curve(objective.metric, axis)) for report in reports)
    return replace(objective, common=common)


def rows(
    runs: Iterable[tuple[Cell, RunReport | None, str]], objective: Objective, columns: Sequence[str], over: list[str]
) -> list[Row]:
    """Return the rows, in the order of the cells.

    Args:
        runs: each cell with its report, if any, and its state.
        objective: the metric, the target and the axis.
        columns: names of `COLUMNS`, as of `chosen`.
        over: the varied settings to average over, such as the seed.
    """
    groups: dict[tuple[tuple[str, str], ...], list[tuple[Cell, RunReport | None, str]]] = {}
    for cell, report, state in runs:
        groups.setdefault(cell.without(over), []).append((cell, report, state))
    return [
        Row(
            dict(varied),
            {name: _mean(name, [report for _, report, _ in members], objective) for name in columns},
            next((state for *_, state in members if state != "finished"), "finished"),
            _labels([cell for cell, report, _ in members if report is not None], over),
        )
        for varied, members in groups.items()
    ]


def _labels(cells: Sequence[Cell], over: Sequence[str]) -> dict[str, tuple[str, ...]]:
    names = [name for name in over if any(name in cell.varied for cell in cells)]
    return {name: tuple(dict.fromkeys(cell.varied[name] for cell in cells)) for name in names}


def _mean(column: str, reports: Sequence[RunReport | None], objective: Objective) -> Mean:
    mean = mean_of([_value(column, report, objective) for report in reports])
    return mean.unless_all if column.endswith("_to_target") else mean


def _value(column: str, report: RunReport | None, objective: Objective) -> float | None:
    name, _, metric = column.partition("@")
    if metric:
        objective = Objective(metric)
    return None if report is None else COLUMNS[name](report, objective)


def as_csv(lines: Sequence[Row]) -> str:
    """Return rows as CSV: for each column the mean, the deviation, the number of runs that have it, and of all runs."""
    text = io.StringIO()
    writer = csv.writer(text, lineterminator="\n")
    first = lines[0]
    columns = [f"{name}{part}" for name in first.values for part in ("", "_std", "_n", "_of")]
    over = dict.fromkeys(name for line in lines for name in line.over)
    writer.writerow([*first.varied, *over, *columns, "state"])
    for line in lines:
        numbers = [part for value in line.values.values() for part in (value.mean, value.std, value.n, value.of)]
        labels = [" ".join(line.over.get(name, ())) for name in over]
        writer.writerow([*line.varied.values(), *labels, *numbers, line.state])
    return text.getvalue()


def markdown(header: Sequence[str], lines: Iterable[Sequence[object]]) -> str:
    """Return a table in Markdown."""
    body = [[str(cell).replace("|", "\\|") for cell in line] for line in lines]
    return "\n".join(f"| {' | '.join(line)} |" for line in [list(header), ["---"] * len(header), *body])


def document_of(lines: Sequence[Row], objective: Objective) -> dict[str, Any]:
    """Return the rows of a table in JSON types."""
    by = {} if objective.by is None else {"by": objective.by, "common": objective.common}
    return {"metric": objective.metric, "target": objective.target, **by, "rows": lines}
