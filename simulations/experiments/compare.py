"""The same task federated and centralized, side by side: metric, rounds or steps, passes, bytes, time.

A pass is the pooled training data seen once. A federated round makes about as many as a client of the mean size makes
of its own data, times counted clients / clients. Bytes are what had to move: of a federation the models and updates, of
a centralized training the data itself, once, as the task reads it. Only a federation has a virtual time.
"""

import json
import math
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

from atoll.parallel.task.local import Local
from atoll.parallel.task.task import Task
from atoll.parallel.trainer.logs import read_log
from atoll.simulations.experiments.report import RunReport, is_loss

if TYPE_CHECKING:
    from matplotlib.axes import Axes

DATA = {"server": "test", "clients": "sites"}
"""A federation's WHO in a metric's name -> the same data's name in a centralized training."""


@dataclass(frozen=True, slots=True)
class Point:
    """One measurement."""

    value: float
    count: int
    """Rounds or steps until then."""
    passes: float
    bytes: int
    virtual_s: float | None
    real_s: float


@dataclass(frozen=True, slots=True)
class Side:
    """One of the two trainings, as far as the metric tells."""

    kind: Literal["federated", "centralized"]
    unit: Literal["rounds", "steps"]
    metric: str
    points: tuple[Point, ...]

    @property
    def last(self) -> Point | None:
        """The newest measurement."""
        return self.points[-1] if self.points else None

    @property
    def best(self) -> float | None:
        """The smallest of a loss, the largest of others."""
        values = [point.value for point in self.points]
        return (min if is_loss(self.metric) else max)(values) if values else None

    def reached(self, target: float) -> Point | None:
        """The first measurement that is as good as the target."""
        return next(
            (p for p in self.points if (p.value <= target if is_loss(self.metric) else p.value >= target)), None
        )


def epochs_of(local: Local, num_examples: int, num_clients: int) -> float:
    """Passes over its own data that a client of the mean size makes in a round.

    Args:
        local: of the run.
        num_examples: of all sites.
        num_clients: among whom they are dealt.
    """
    if local.max_steps is None or local.batch_size is None:
        return min(local.epochs, local.max_steps or local.epochs)
    return min(local.epochs, local.max_steps * local.batch_size * num_clients / num_examples)


def federated(report: RunReport, metric: str, *, epochs: float) -> Side:
    """The federated side.

    Args:
        report: of the simulated run.
        metric: WHO/METRIC.
        epochs: `epochs_of` the run.
    """
    passes = 0.0
    points = []
    group, _, name = metric.partition("/")
    for line in report.rounds:
        passes += epochs * line["counted"] / report.num_clients
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
    return Side("federated", "rounds", metric, tuple(points))


def centralized(log: Path, metric: str, *, data_bytes: int) -> Side:
    """The centralized side, from the log of `atoll train`; an evaluation's time is that of the last step told before.

    Args:
        log: its `log.jsonl`.
        metric: WHO/METRIC as a federation calls it.
        data_bytes: of the pooled training data.
    """
    group, _, name = metric.partition("/")
    steps = read_log(log, "step")
    points = []
    for step, event in sorted(read_log(log, "evaluation").items()):
        if (value := event.get(f"{DATA.get(group, group)}/{name}")) is not None:
            told = [at for at in steps if at <= step]
            seconds = steps[max(told)]["seconds"] if told else 0.0
            points.append(Point(value, step, event["epoch"], data_bytes, None, seconds))
    return Side("centralized", "steps", metric, tuple(points))


def passes_of(report: RunReport, *, epochs: float) -> int:
    """Whole passes over the pooled data that the federation made, at least one: the same work for the other side."""
    return max(1, math.ceil(epochs * sum(report.participation("counted")) / report.num_clients))


@dataclass(frozen=True, slots=True)
class Pooled:
    """The training data of all sites."""

    num_examples: int
    bytes: int
    """As the task reads them: of each site its first example's, times its examples."""


def pooled(task: Task) -> Pooled:
    """How much the sites hold together."""
    held = [data for site in task.sites if (data := task.data(site, "train")) is not None and len(data)]
    return Pooled(sum(map(len, held)), sum(len(data) * _size(data[0]) for data in held))


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
    """A row for each side, and with a target one more for each: what it took to get there."""
    found = []
    for side in sides:
        found.append(_row(side, side.kind, side.last) | {"best": side.best})
        if target is not None:
            found.append(_row(side, f"{side.kind}, to {target:g}", side.reached(target)))
    return found


def _row(side: Side, what: str, point: Point | None) -> dict[str, Any]:
    if point is None:
        return dict.fromkeys(COLUMNS) | {"": what}
    values = (what, point.value, None, f"{point.count} {side.unit}", point.passes, point.bytes)
    return dict(zip(COLUMNS, (*values, point.virtual_s, point.real_s), strict=True))


def plot(sides: Sequence[Side], path: Path) -> Path:
    """The metric over passes and over real seconds, as a PNG; raises `NoMatplotlib` as `plots.plots`."""
    from atoll.simulations.experiments.plots import DPI, SIZE, figure_type

    figure = figure_type()(figsize=(2 * SIZE[0], SIZE[1]), layout="constrained")
    left, right = figure.subplots(1, 2)
    for side in sides:
        ys = [point.value for point in side.points]
        left.plot([point.passes for point in side.points], ys, label=side.kind, marker=".")
        right.plot([point.real_s for point in side.points], ys, label=side.kind, marker=".")
    _dress(left, "passes over the pooled data", sides[0].metric)
    _dress(right, "real time [s]", sides[0].metric)
    figure.savefig(path, dpi=DPI)
    return path


def _dress(axes: "Axes", label: str, metric: str) -> None:
    axes.set(xlabel=label, ylabel=metric)
    axes.grid(alpha=0.3)
    axes.legend(frameon=False)


def write(sides: Sequence[Side], target: float | None, path: Path) -> None:
    """All of it as JSON."""
    curves = {side.kind: [[point.passes, point.real_s, point.value] for point in side.points] for side in sides}
    document = {"metric": sides[0].metric, "target": target, "rows": rows(sides, target), "curves": curves}
    path.write_text(json.dumps(document, indent=2) + "\n", "utf-8")
