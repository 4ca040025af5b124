"""PNG plots of one run, or of several together. They need matplotlib (the extra `sim`), imported when they draw.

Each plot is a function that draws on one pair of axes; `plots` writes a file of each, and one of all of them.
"""

import math
from collections.abc import Callable, Sequence
from itertools import zip_longest
from pathlib import Path
from typing import TYPE_CHECKING, Any

from atoll.simulations.experiments.report import RunReport

if TYPE_CHECKING:
    from matplotlib.axes import Axes

FATES = {
    "reported": "#4c9f70",
    "released": "#a8d5ba",
    "stragglers": "#e9a23b",
    "lost": "#9aa0a6",
    "failed": "#d1495b",
    "refused": "#6d597a",
}
"""Fates of invited clients and their colours; released clients were stopped, because enough others had reported."""

SIZE = (6.4, 4.0)
DPI = 120
"""Dots per inch, for a width of 768 pixels, at which a README shows a plot in full."""


class NoMatplotlib(RuntimeError):
    """The extra `sim` is not installed."""


def plots(reports: Sequence[RunReport], folder: Path, *, metric: str | None = None) -> list[Path]:
    """Draw the plots of some runs.

    Args:
        reports: at least one; several are drawn together, each with its name.
        folder: the folder of the files, which is made if it is missing.
        metric: the name of the metric, WHO/METRIC; None: `main_metric`.

    Returns:
        The files: one for each plot that has data, and `overview.png` with all of them.

    Raises:
        NoMatplotlib: matplotlib is not installed.
    """
    make = figure_type()
    folder.mkdir(parents=True, exist_ok=True)
    metric = metric or main_metric(reports)
    files, shown = [], []
    for name, draw in PLOTS.items():
        figure = make(figsize=SIZE, layout="constrained")
        axes = figure.subplots()
        draw(axes, reports, metric)
        if axes.has_data():
            shown.append(draw)
            files.append(_saved(figure, folder / f"{name}.png"))
    rows = max(1, math.ceil(len(shown) / 2))
    figure = make(figsize=(SIZE[0] * 2, SIZE[1] * rows), layout="constrained")
    for axes, draw in zip_longest(figure.subplots(rows, 2, squeeze=False).flat, shown):
        if draw is None:
            axes.axis("off")
        else:
            draw(axes, reports, metric)
    return [*files, _saved(figure, folder / "overview.png")]


def main_metric(reports: Sequence[RunReport]) -> str:
    """Return the default metric of a plot: the first one that is not a loss, or else the first one."""
    names = [name for report in reports for name in report.metrics]
    return next((name for name in names if not name.endswith("/loss")), next(iter(names), "server/loss"))


def metric_per_round(axes: "Axes", reports: Sequence[RunReport], metric: str) -> None:
    """Draw the metric over the rounds."""
    _curves(axes, reports, metric, "round", "round", "round", 1.0)
    _over_rounds(axes)


def metric_per_time(axes: "Axes", reports: Sequence[RunReport], metric: str) -> None:
    """Draw the metric over the virtual seconds, minutes or hours."""
    scale, unit = _time_unit(max((line["virtual_s"] for report in reports for line in report.rounds), default=0.0))
    _curves(axes, reports, metric, "virtual_s", "virtual time", f"virtual time [{unit}]", scale)


def metric_per_byte(axes: "Axes", reports: Sequence[RunReport], metric: str) -> None:
    """Draw the metric over the bytes that clients and server have moved."""
    _curves(axes, reports, metric, "bytes", "byte moved", "moved, both ways [MB]", 1e6)


def participation(axes: "Axes", reports: Sequence[RunReport], _metric: str) -> None:
    """Draw the fates of invited clients: of one run for each round, of several runs on average."""
    if len(reports) == 1:
        numbers = [line["round"] for line in reports[0].rounds]
        bottom = [0] * len(numbers)
        for fate, colour in FATES.items():
            counts = reports[0].participation(fate)
            if any(counts):
                axes.bar(numbers, counts, bottom=bottom, width=1.0, color=colour, label=fate)
                bottom = [low + count for low, count in zip(bottom, counts, strict=True)]
        _over_rounds(axes)
        axes.set(ylabel="clients")
    else:
        names = [report.name for report in reports]
        left = [0.0] * len(reports)
        for fate, colour in FATES.items():
            means = [sum(report.participation(fate)) / max(1, len(report.rounds)) for report in reports]
            if any(means):
                axes.barh(names, means, left=left, color=colour, label=fate)
                left = [low + mean for low, mean in zip(left, means, strict=True)]
        axes.invert_yaxis()
        axes.set(xlabel="clients in a round, on average")
    axes.set_title("fates of the invited clients")
    _legend(axes)


def bytes_per_round(axes: "Axes", reports: Sequence[RunReport], _metric: str) -> None:
    """Draw the bytes moved up and down so far, and the bytes of an upload without codec."""
    for report, style in zip(reports, _styles(len(reports)), strict=True):
        numbers = [line["round"] for line in report.rounds]
        name = "" if len(reports) == 1 else f"{report.name}, "
        axes.plot(numbers, _megabytes(report, "bytes_up"), label=f"{name}up", **style)
        axes.plot(numbers, _megabytes(report, "bytes_down"), label=f"{name}down", **style | {"linestyle": "--"})
        if any(line.get("bytes_up_plain") not in (None, line["bytes_up"]) for line in report.rounds):
            plain = _megabytes(report, "bytes_up_plain")
            axes.plot(numbers, plain, label=f"{name}up without codec", **style | {"linestyle": ":"})
    _over_rounds(axes)
    axes.set(ylabel="so far [MB]", title="bytes moved")
    _legend(axes)


def fairness(axes: "Axes", reports: Sequence[RunReport], metric: str) -> None:
    """Draw the metric of each client on its own data, worst first, with the tenth percentile and the variance."""
    name = metric.partition("/")[2]
    for report, style in zip(reports, _styles(len(reports)), strict=True):
        if (fair := report.fairness(name)) is None:
            continue
        share = [100 * (rank + 0.5) / len(fair.values) for rank in range(len(fair.values))]
        label = f"{report.name}: 10th percentile {fair.percentile(0.1):.3g}, variance {fair.variance:.2g}"
        axes.plot(share, fair.values, label=label, **style)
        axes.plot([10], [fair.percentile(0.1)], marker="o", color=style["color"])
    axes.set(xlabel="clients, the worst first [%]", ylabel=name, title=f"{name} of each client on its own data")
    _legend(axes)


PLOTS: dict[str, Callable[["Axes", Sequence[RunReport], str], None]] = {
    "metric_per_round": metric_per_round,
    "metric_per_time": metric_per_time,
    "metric_per_byte": metric_per_byte,
    "participation": participation,
    "bytes": bytes_per_round,
    "fairness": fairness,
}
"""Plots by the names of their files."""


def _curves(
    axes: "Axes", reports: Sequence[RunReport], metric: str, over: Any, per: str, label: str, scale: float
) -> None:
    for report, style in zip(reports, _styles(len(reports)), strict=True):
        xs, ys = report.curve(metric, over)
        if xs:
            axes.plot([x / scale for x in xs], ys, label=report.name, **style)
    axes.set(xlabel=label, ylabel=metric, title=f"{metric} per {per}")
    _legend(axes)


def _over_rounds(axes: "Axes") -> None:
    """Label the axis of rounds with whole numbers."""
    axes.set_xlabel("round")
    axes.locator_params(axis="x", integer=True)


def _styles(count: int) -> list[dict[str, Any]]:
    """Return a colour for each run, and from the eleventh on also another kind of line, so that all differ."""
    lines = ("-", "--", "-.", ":")
    return [{"color": f"C{k % 10}", "linestyle": lines[k // 10 % 4], "linewidth": 1.8} for k in range(count)]


def _legend(axes: "Axes") -> None:
    handles, _ = axes.get_legend_handles_labels()
    axes.set_axisbelow(True)
    axes.grid(alpha=0.3)
    if handles:
        columns = 1 if len(handles) <= 4 else 2
        axes.legend(loc="upper left", bbox_to_anchor=(0, -0.16), ncols=columns, fontsize=8, frameon=False)


def _megabytes(report: RunReport, name: str) -> list[float]:
    return [line[name] / 1e6 for line in report.rounds]


def _time_unit(longest: float) -> tuple[float, str]:
    if longest < 600:
        return 1.0, "s"
    return (60.0, "min") if longest < 36_000 else (3600.0, "h")


def _saved(figure: Any, path: Path) -> Path:
    figure.savefig(path, dpi=DPI)
    return path


def figure_type() -> Any:
    """Return matplotlib's `Figure`, which draws files and opens no window on any screen.

    Raises:
        NoMatplotlib: matplotlib is not installed.
    """
    try:
        from matplotlib.figure import Figure
    except ModuleNotFoundError as error:
        raise NoMatplotlib("plots need matplotlib, which is not installed: pip install 'atoll[sim]'") from error
    return Figure
