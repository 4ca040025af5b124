"""PNG plots of one run, or of several together. They need matplotlib (the extra `sim`), imported when they draw.

Each plot is a function that draws on one pair of axes; `plots` writes a file of each, and one of all of them. Runs that
differ only in the seed are drawn as their mean, with a band of one standard deviation on each side (`bands`).
"""

import io
import math
from collections.abc import Callable, Sequence
from functools import cache, partial
from itertools import zip_longest
from pathlib import Path
from typing import TYPE_CHECKING, Any

from atoll.protocol.json_values import flat
from atoll.simulations.experiments.bands import AXES, Band, Curve, Mean, Repeats, band_of, each, largest_common, mean_of
from atoll.simulations.experiments.report import Axis, RunReport
from atoll.simulations.federation.report import NOISE_COHORT

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

Drawn = Sequence[RunReport | Repeats]
"""Runs to draw together: single ones, or repeats."""

SIZE = (6.4, 4.0)
DPI = 120
"""Dots per inch, for a width of 768 pixels, at which a README shows a plot in full."""


class NoMatplotlib(RuntimeError):
    """Error: the extra `sim` is not installed."""


def plots(reports: Drawn, folder: Path, *, metric: str | None = None) -> list[Path]:
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
    metric = metric or main_metric([run for one in each(reports) for run in one.runs])
    files, shown = [], []
    for name, draw in PLOTS.items():
        figure = make(figsize=SIZE, layout="constrained")
        axes = figure.subplots()
        draw(axes, reports, metric)
        if axes.has_data():
            shown.append(partial(draw, reports=reports, metric=metric))
            files.append(_saved(figure, folder / f"{name}.png"))
    return [*files, _tiled(shown, 2, folder / "overview.png")]


def metrics_plot(reports: Drawn, path: Path) -> Path:
    """Draw every metric over rounds, updates, virtual time and bytes, a row for each metric.

    Raises:
        NoMatplotlib: matplotlib is not installed.
    """
    over = (metric_per_round, metric_per_update, metric_per_time, metric_per_byte)
    names = dict.fromkeys(name for one in each(reports) for run in one.runs for name in run.metrics)
    return _tiled([partial(draw, reports=reports, metric=name) for name in names for draw in over], len(over), path)


def comparison_plot(reports: Drawn, metric: str, by: str, path: Path) -> Path:
    """Draw the metric over the axis of a comparison, with a line at the last position where every run has a value.

    Args:
        reports: the runs.
        metric: the name of the metric.
        by: the axis, one of `bands.AXES`.
        path: the file.

    Raises:
        NoMatplotlib: matplotlib is not installed.
    """
    figure = figure_type()(figsize=SIZE, layout="constrained")
    axes, axis = figure.subplots(), AXES[by].axis
    _curves(axes, reports, metric, axis, axis, AXES[by].label, 1.0)
    axes.set_title(f"{metric} by {by}")
    runs = [run for one in each(reports) for run in one.runs]
    if (common := largest_common(Curve(*run.curve(metric, axis)) for run in runs)) is not None:
        axes.axvline(common, color="#9aa0a6", linewidth=0.8, linestyle=":")
    return _saved(figure, path)


def _tiled(draws: Sequence[Callable[["Axes"], None]], columns: int, path: Path) -> Path:
    rows = max(1, math.ceil(len(draws) / columns))
    figure = figure_type()(figsize=(SIZE[0] * columns, SIZE[1] * rows), layout="constrained")
    for axes, draw in zip_longest(figure.subplots(rows, columns, squeeze=False).flat, draws):
        if draw is None:
            axes.axis("off")
        else:
            draw(axes)
    return _saved(figure, path)


def main_metric(reports: Sequence[RunReport]) -> str:
    """Return the default metric of a plot: the first one that is not a loss, or else the first one."""
    names = [name for report in reports for name in report.metrics]
    return next((name for name in names if not name.endswith("/loss")), next(iter(names), "server/loss"))


def metric_per_round(axes: "Axes", reports: Drawn, metric: str) -> None:
    """Draw the metric over the rounds."""
    _curves(axes, reports, metric, "round", "round", "round", 1.0)
    _over_rounds(axes)


def metric_per_update(axes: "Axes", reports: Drawn, metric: str) -> None:
    """Draw the metric over the updates that the versions count, by which runs of all modes are comparable."""
    _curves(axes, reports, metric, "updates", "update", "updates counted", 1.0)


def metric_per_second(axes: "Axes", reports: Drawn, metric: str) -> None:
    """Draw the metric over the real seconds of the simulation."""
    _curves(axes, reports, metric, "real_s", "real second", "real time [s]", 1.0)


def metric_per_time(axes: "Axes", reports: Drawn, metric: str) -> None:
    """Draw the metric over the virtual seconds, minutes or hours."""
    scale, unit = _time_unit(
        max((line["virtual_s"] for one in each(reports) for run in one.runs for line in run.rounds), default=0.0)
    )
    _curves(axes, reports, metric, "virtual_s", "virtual time", f"virtual time [{unit}]", scale)


def metric_per_byte(axes: "Axes", reports: Drawn, metric: str) -> None:
    """Draw the metric over the bytes transferred."""
    _curves(axes, reports, metric, "bytes", "byte moved", "moved, both ways [MB]", 1e6)


def participation(axes: "Axes", reports: Drawn, metric: str) -> None:
    """Draw the fates of invited clients: for one run by round, for several runs on average."""
    repeats = each(reports)
    if len(repeats) == len(repeats[0].runs) == 1:
        _fates_by_round(axes, repeats[0].runs[0])
    else:
        names = [one.name for one in repeats]
        left = [0.0] * len(repeats)
        for fate, colour in FATES.items():
            means = [_clients_in_a_round(one, fate) for one in repeats]
            if any(means):
                axes.barh(names, means, left=left, color=colour, label=fate)
                left = [low + mean for low, mean in zip(left, means, strict=True)]
        axes.invert_yaxis()
        axes.set(xlabel="clients in a round, on average")
    axes.set_title("fates of the invited clients")
    _legend(axes)


def _fates_by_round(axes: "Axes", report: RunReport) -> None:
    numbers = [line["round"] for line in report.rounds]
    bottom = [0] * len(numbers)
    for fate, colour in FATES.items():
        counts = report.participation(fate)
        if any(counts):
            axes.bar(numbers, counts, bottom=bottom, width=1.0, color=colour, label=fate)
            bottom = [low + count for low, count in zip(bottom, counts, strict=True)]
    _over_rounds(axes)
    axes.set(ylabel="clients")


def _clients_in_a_round(one: Repeats, fate: str) -> float:
    """Return the number of clients with a fate per round: the mean over a run's rounds, then over the runs."""
    means = [sum(run.participation(fate)) / max(1, len(run.rounds)) for run in one.runs]
    return sum(means) / len(means)


def bytes_per_round(axes: "Axes", reports: Drawn, metric: str) -> None:
    """Draw the total bytes transferred up and down, and the bytes of an upload without codec."""
    repeats = each(reports)
    for one, style in zip(repeats, _styles(len(repeats)), strict=True):
        name = "" if len(repeats) == 1 else f"{one.name}, "
        _band(axes, _bytes(one, "bytes_up"), f"{name}up", style)
        _band(axes, _bytes(one, "bytes_down"), f"{name}down", style | {"linestyle": "--"})
        lines = [line for run in one.runs for line in run.rounds]
        if any(line.get("bytes_up_plain") not in (None, line["bytes_up"]) for line in lines):
            _band(axes, _bytes(one, "bytes_up_plain"), f"{name}up without codec", style | {"linestyle": ":"})
    _over_rounds(axes)
    axes.set(ylabel="so far [MB]", title="bytes moved")
    _legend(axes)


def _bytes(one: Repeats, name: str) -> Band:
    """Return the band of bytes over the rounds [MB]."""
    return band_of(
        [Curve([line["round"] for line in run.rounds], [line[name] / 1e6 for line in run.rounds]) for run in one.runs]
    )


def fairness(axes: "Axes", reports: Drawn, metric: str) -> None:
    """Draw the metric of each client on its data, worst first, with the tenth percentile and the variance.

    For repeats, each point is the mean over the clients of equal rank, as long as every run has a client there.
    """
    name, repeats = metric.partition("/")[2], each(reports)
    for one, style in zip(repeats, _styles(len(repeats)), strict=True):
        found = [fair for run in one.runs if (fair := run.over_clients(name)) is not None]
        if not found:
            continue
        same = [fair for fair in found if len(fair.values) == len(found[0].values)]
        share = [100 * (rank + 0.5) / len(found[0].values) for rank in range(len(found[0].values))]
        lowest = band_of([Curve([10.0], [fair.percentile(0.1)]) for fair in same]).means[0]
        variance = sum(fair.variance for fair in same) / len(same)
        label = f"{one.name}: 10th percentile {lowest:.3g}, variance {variance:.2g}"
        _band(axes, band_of([Curve(share, fair.values) for fair in same]), label, style)
        axes.plot([10], [lowest], marker="o", color=style["color"])
    axes.set(xlabel="clients, the worst first [%]", ylabel=name, title=f"{name} of each client on its own data")
    _legend(axes)


def metric_per_epsilon(axes: "Axes", reports: Drawn, metric: str) -> None:
    """Draw the last value of the metric over the epsilon that a run has spent; runs without privacy are lines across.

    Points are joined if the runs differ in their budget and their noise alone. No point is a guarantee: the runs are
    simulated. Nothing is drawn unless a private run is beside another one.
    """
    lines: dict[str, list[tuple[Mean, Mean]]] = {}
    across: list[tuple[str, Mean]] = []
    repeats = each(reports)
    of_mechanism = [_mechanism(one.runs[0]) for one in repeats]
    for one, settings in zip(repeats, of_mechanism, strict=True):
        value = mean_of([run.last(metric) for run in one.runs])
        epsilon = mean_of([run.epsilon for run in one.runs])
        if value.mean is None:
            continue
        if epsilon.n == epsilon.of:
            lines.setdefault(_differing(settings, of_mechanism), []).append((epsilon, value))
        elif not epsilon.n:
            across.append((one.name, value))
    if not lines or len(across) + sum(map(len, lines.values())) < 2:
        return
    styles = iter(_styles(len(lines) + len(across)))
    for name, points in lines.items():
        points.sort(key=lambda point: point[0].mean or 0.0)
        xs, ys = [[mean.mean or 0.0 for mean in means] for means in zip(*points, strict=True)]
        stds = [value.std or 0.0 for _, value in points]
        bars: dict[str, Any] = {"yerr": stds, "capsize": 3} if any(stds) else {}
        axes.errorbar(xs, ys, marker="o", label=name, **bars, **next(styles))
    for name, value in across:
        assert value.mean is not None
        axes.axhline(value.mean, label=f"{name}: no privacy", **(next(styles) | {"linestyle": "--"}))
    label = "epsilon spent by the most used client (simulated: no guarantee)"
    axes.set(xscale="log", xlabel=label, ylabel=metric, title=f"{metric} per epsilon")
    _legend(axes)


def _mechanism(report: RunReport) -> dict[str, Any]:
    """Return what tells points of a plot over epsilon apart: the settings but for budget, noise and seed."""
    of_budget = ("privacy.epsilon", "privacy.noise_multiplier", "seed", "name")
    return {name: value for name, value in flat(report.settings).items() if name not in of_budget}


def _differing(settings: dict[str, Any], among: Sequence[dict[str, Any]]) -> str:
    """Return the settings that a line of a plot over epsilon is named by: those in which private runs differ."""
    private = [each for each in among if any(name.startswith("privacy.") for name in each)]
    names = sorted(name for name in settings if any(each.get(name) != settings[name] for each in private))
    unit, delta = settings.get("privacy.unit", "client"), settings.get("privacy.delta")
    more = "".join(f", {name.rpartition('.')[2]} {settings[name]}" for name in names if name != "privacy.delta")
    cohort = settings.get(NOISE_COHORT)
    noise = "" if cohort is None or NOISE_COHORT in names else f", noise of a cohort of {cohort:,}"
    return f"one {unit} at delta {delta:g}{noise}{more}"


PLOTS: dict[str, Callable[..., None]] = {
    "metric_per_round": metric_per_round,
    "metric_per_update": metric_per_update,
    "metric_per_time": metric_per_time,
    "metric_per_second": metric_per_second,
    "metric_per_byte": metric_per_byte,
    "participation": participation,
    "bytes": bytes_per_round,
    "fairness": fairness,
    "utility": metric_per_epsilon,
}
"""Plots by the names of their files."""


def _curves(axes: "Axes", reports: Drawn, metric: str, over: Axis, per: str, label: str, scale: float) -> None:
    repeats = each(reports)
    for one, style in zip(repeats, _styles(len(repeats)), strict=True):
        _band(axes, one.band(metric, over), one.name, style, scale)
    axes.set(xlabel=label, ylabel=metric, title=f"{metric} per {per}")
    _legend(axes)


def _band(axes: "Axes", band: Band, label: str, style: dict[str, Any], scale: float = 1.0) -> None:
    """Draw a mean and its deviation; as steps if the curves were measured at different positions."""
    if not band.xs:
        return
    xs = [x / scale for x in band.xs]
    name = label if band.n == 1 else f"{label} (n = {band.n})"
    axes.plot(xs, band.means, label=name, drawstyle="default" if band.are_aligned else "steps-post", **style)
    if band.stds is not None:
        low = [mean - std for mean, std in zip(band.means, band.stds, strict=True)]
        high = [mean + std for mean, std in zip(band.means, band.stds, strict=True)]
        step: Any = None if band.are_aligned else "post"
        axes.fill_between(xs, low, high, step=step, color=style["color"], alpha=0.2, linewidth=0)


def _over_rounds(axes: "Axes") -> None:
    """Label the axis of rounds with whole numbers."""
    axes.set_xlabel("round")
    axes.locator_params(axis="x", integer=True)


def _styles(count: int) -> list[dict[str, Any]]:
    """Return a colour for each run, and from the eleventh run on also another line style, so that all differ."""
    lines = ("-", "--", "-.", ":")
    return [{"color": f"C{k % 10}", "linestyle": lines[k // 10 % 4], "linewidth": 1.8} for k in range(count)]


def _legend(axes: "Axes") -> None:
    handles, _ = axes.get_legend_handles_labels()
    axes.set_axisbelow(True)
    axes.grid(alpha=0.3)
    if handles:
        columns = 1 if len(handles) <= 4 else 2
        axes.legend(loc="upper left", bbox_to_anchor=(0, -0.16), ncols=columns, fontsize=8, frameon=False)


def _time_unit(longest: float) -> tuple[float, str]:
    if longest < 600:
        return 1.0, "s"
    return (60.0, "min") if longest < 36_000 else (3600.0, "h")


def _saved(figure: Any, path: Path) -> Path:
    figure.savefig(path, dpi=DPI)
    return path


def figure_type() -> Any:
    """Return matplotlib's `Figure`, which draws files, opens no window, and can be shown by a notebook.

    Raises:
        NoMatplotlib: matplotlib is not installed.
    """
    try:
        from matplotlib.figure import Figure
    except ModuleNotFoundError as error:
        raise NoMatplotlib("plots need matplotlib, which is not installed: pip install 'atoll[sim]'") from error
    return _shown(Figure)


@cache
def _shown(figure: Any) -> Any:
    """Return the type of figures that a notebook shows without pyplot."""

    class Shown(figure):  # type: ignore[misc]
        def _repr_png_(self) -> bytes:
            picture = io.BytesIO()
            self.savefig(picture, format="png", dpi=100, metadata={"Software": None})
            return picture.getvalue()

    Shown.__name__ = Shown.__qualname__ = figure.__name__
    return Shown
