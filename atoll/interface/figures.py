"""Figures of matplotlib for notebooks, which no window shows."""

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

from atoll.interface.errors import AtollError, one_error

if TYPE_CHECKING:
    from atoll.simulations.experiments.plots import Drawn


def curves(reports: "Drawn", metric: str | None) -> Any:
    """Return a figure with a metric of runs over their rounds.

    Args:
        reports: the reports on the runs; those that differ in the seed alone may be one curve with its band.
        metric: `accuracy`, or with its group `server/accuracy`; None: the first one that is no loss.

    Raises:
        AtollError: matplotlib is not installed, or no run has measured it.
    """
    from atoll.simulations.experiments.bands import each
    from atoll.simulations.experiments.plots import SIZE, NoMatplotlib, figure_type, main_metric, metric_per_round

    runs = [run for one in each(reports) for run in one.runs]
    known = list(dict.fromkeys(name for run in runs for name in run.metrics))
    with one_error(NoMatplotlib):
        figure = figure_type()(figsize=SIZE, layout="constrained")
    metric_per_round(figure.subplots(), reports, metric_of(known, metric or main_metric(runs)))
    return figure


def line(points: Mapping[int, float], metric: str, over: str) -> Any:
    """Return a figure with a metric over the numbers of versions or steps.

    Args:
        points: the values by the number of a version or a step.
        metric: the name of the metric.
        over: the name of the numbers, such as `version`.

    Raises:
        AtollError: matplotlib is not installed.
    """
    from atoll.simulations.experiments.plots import SIZE, NoMatplotlib, figure_type

    with one_error(NoMatplotlib):
        figure = figure_type()(figsize=SIZE, layout="constrained")
    axes = figure.subplots()
    axes.plot(list(points), list(points.values()), linewidth=1.8)
    axes.set(xlabel=over, ylabel=metric, title=f"{metric} per {over}")
    axes.locator_params(axis="x", integer=True)
    axes.grid(alpha=0.3)
    return figure


def main_of(known: Sequence[str]) -> str:
    """Return the first metric that is no loss, or else the loss."""
    return next((name for name in known if not name.endswith("/loss")), "loss")


def metric_of(known: Sequence[str], metric: str) -> str:
    """Return the full name of a metric, GROUP/NAME, by this name or by the NAME alone.

    Raises:
        AtollError: it was not measured; the message lists those that were.
    """
    found = next((name for name in known if metric in (name, name.partition("/")[2])), None)
    if found is None:
        raise AtollError(f"metric: got {metric!r}; allowed: {', '.join(known) or 'none was measured'}")
    return found
