"""The comparison of federated and centralized training of a task: metric, rounds or steps, passes, bytes, time.

A pass is one pass over the pooled training data. A federated round makes about as many passes as a client of mean size
makes over its data, times counted clients / clients. Bytes are the data that must move: models and updates in a
federation, the data itself, once and as the task reads it, in centralized training. Only a federation has virtual time.
"""

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

from atoll.ground.printable import count_of
from atoll.parallel.trainer.logs import read_log
from atoll.simulations.experiments.report import RunReport
from atoll.task.json_text import to_json
from atoll.task.local import Local
from atoll.task.metrics import is_loss
from atoll.task.randomness import data_of
from atoll.task.task import Task
from atoll.training.data.batches import row_at

if TYPE_CHECKING:
    from matplotlib.axes import Axes

DATA = {"server": "test", "clients": "sites"}
"""Names of the same data in centralized training, by the WHO of a federation's metrics."""


@dataclass(frozen=True, slots=True)
class Point:
    """One measurement of the metric."""

    value: float
    count: int
    """Number of rounds or steps until then."""
    passes: float | None
    """Passes over the pooled data until then; None: unknown."""
    bytes: int | None
    virtual_s: float | None
    real_s: float


@dataclass(frozen=True, slots=True)
class Side:
    """Measurements of one of the trainings."""

    kind: str
    """Name of the training, such as `federated` or `centralized`."""
    unit: Literal["rounds", "steps"]
    metric: str
    points: tuple[Point, ...]

    @property
    def last(self) -> Point | None:
        """The newest measurement."""
        return self.points[-1] if self.points else None

    @property
    def best(self) -> float | None:
        """The best value: the smallest of a loss, the largest of any other metric."""
        values = [point.value for point in self.points]
        return (min if is_loss(self.metric) else max)(values) if values else None

    def reached(self, target: float) -> Point | None:
        """Return the first measurement that is at least as good as the target; None: there is none."""
        return next(
            (p for p in self.points if (p.value <= target if is_loss(self.metric) else p.value >= target)), None
        )


def epochs_of(local: Local, num_examples: int, num_clients: int) -> float:
    """Compute the passes over its data that a client of mean size makes in a round.

    Args:
        local: the local settings of the run.
        num_examples: the number of examples of all sites.
        num_clients: the number of clients that share them.
    """
    if local.max_steps is None or local.batch_size is None:
        return min(local.epochs, local.max_steps or local.epochs)
    return min(local.epochs, local.max_steps * local.batch_size * num_clients / num_examples)


def federated(
    report: RunReport, metric: str, *, epochs: Callable[[int], float] | None, kind: str = "federated"
) -> Side:
    """Return the measurements of the federated training.

    Args:
        report: the report on the simulated run.
        metric: the name of the metric, WHO/METRIC.
        epochs: `epochs_of` each round; None: unknown, and so are the passes.
        kind: the name of this side.
    """
    passes = None if epochs is None else 0.0
    points = []
    group, _, name = metric.partition("/")
    for line in report.rounds:
        if epochs is not None and passes is not None:
            passes += epochs(line["round"]) * line["counted"] / report.num_clients
        if (value := (line.get(group) or {}).get(name)) is not None:
            points.append(
                Point(
                    value,
                    line["round"],
                    passes,
                    line["bytes_up"] + line["bytes_down"],
                    line["virtual_s"],
                    line["real_s"],
                )
            )
    return Side(kind, "rounds", metric, tuple(points))


def centralized(log: Path, metric: str, *, data_bytes: int | None, kind: str = "centralized") -> Side:
    """Return the measurements of the centralized training; the time of each comes from the last logged step before it.

    Args:
        log: the `log.jsonl` of `atoll train`.
        metric: the name of the metric in a federation, WHO/METRIC.
        data_bytes: the size of the pooled training data; None: unknown.
        kind: the name of this side.
    """
    group, _, name = metric.partition("/")
    steps = read_log(log, "step")
    points = []
    for step, event in sorted(read_log(log, "evaluation").items()):
        if (value := event.get(f"{DATA.get(group, group)}/{name}")) is not None:
            logged = [at for at in steps if at <= step]
            seconds = steps[max(logged)]["seconds"] if logged else 0.0
            points.append(Point(value, step, event["epoch"], data_bytes, None, seconds))
    return Side(kind, "steps", metric, tuple(points))


def passes_of(report: RunReport, *, epochs: Callable[[int], float]) -> int:
    """Return the whole passes over the pooled data of the federation, at least one, for centralized training."""
    counted: float = sum(epochs(line["round"]) * line["counted"] for line in report.rounds)
    return max(1, math.ceil(counted / report.num_clients))


@dataclass(frozen=True, slots=True)
class Pooled:
    """Size of the training data of all sites."""

    num_examples: int
    bytes: int
    """Size as the task reads the data: for each site, the size of its first example times its number of examples."""


def pooled(task: Task) -> Pooled:
    """Measure the training data of all sites."""
    datasets = [data for site in task.sites if (data := data_of(task, site, "train")) is not None and len(data)]
    return Pooled(sum(map(len, datasets)), sum(len(data) * _size(row_at(data, 0)) for data in datasets))


def _size(example: Any) -> int:
    if hasattr(example, "nbytes"):
        return int(example.nbytes)
    if isinstance(example, dict):
        return sum(map(_size, example.values()))
    if isinstance(example, list | tuple):
        return sum(map(_size, example))
    return len(example) if isinstance(example, str | bytes) else 8


COLUMNS = ("", "final", "best", "length", "passes", "bytes", "virtual_s", "real_s")


def rows(sides: Sequence[Side], target: float | None) -> list[dict[str, Any]]:
    """Return a row for each side, and with a target another one with the cost to reach it."""
    table = []
    for side in sides:
        table.append(_row(side, side.kind, side.last) | {"best": side.best})
        if target is not None:
            table.append(_row(side, f"{side.kind}, to {target:g}", side.reached(target)))
    return table


def _row(side: Side, label: str, point: Point | None) -> dict[str, Any]:
    if point is None:
        return dict.fromkeys(COLUMNS) | {"": label}
    values = (label, point.value, None, count_of(point.count, side.unit[:-1]), point.passes, point.bytes)
    return dict(zip(COLUMNS, (*values, point.virtual_s, point.real_s), strict=True))


def figure_of(sides: Sequence[Side]) -> Any:
    """Return a figure of matplotlib with the metric over passes and over real seconds.

    Raises:
        NoMatplotlib: matplotlib is not installed.
    """
    from atoll.simulations.experiments.plots import SIZE, figure_type

    figure = figure_type()(figsize=(2 * SIZE[0], SIZE[1]), layout="constrained")
    left, right = figure.subplots(1, 2)
    for side in sides:
        known = [point for point in side.points if point.passes is not None]
        left.plot([point.passes for point in known], [point.value for point in known], label=side.kind, marker=".")
        seconds, values = [point.real_s for point in side.points], [point.value for point in side.points]
        right.plot(seconds, values, label=side.kind, marker=".")
    _dress(left, "passes over the pooled data", sides[0].metric)
    _dress(right, "real time [s]", sides[0].metric)
    return figure


def plot(sides: Sequence[Side], path: Path) -> Path:
    """Draw `figure_of` the sides as a PNG; errors as there."""
    from atoll.simulations.experiments.plots import DPI

    figure_of(sides).savefig(path, dpi=DPI)
    return path


def _dress(axes: "Axes", label: str, metric: str) -> None:
    axes.set(xlabel=label, ylabel=metric)
    axes.grid(alpha=0.3)
    if axes.lines:
        axes.legend(frameon=False)


def document_of(sides: Sequence[Side], target: float | None) -> dict[str, Any]:
    """Return the metric, the target and the rows in JSON types, as `atoll compare --json` prints them."""
    return {"metric": sides[0].metric, "target": target, "rows": rows(sides, target)}


def write(sides: Sequence[Side], target: float | None, path: Path) -> None:
    """Write table and curves as JSON."""
    curves = {side.kind: [[point.passes, point.real_s, point.value] for point in side.points] for side in sides}
    path.write_text(to_json(document_of(sides, target) | {"curves": curves}, indent=2) + "\n", "utf-8")
