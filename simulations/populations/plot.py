"""The plot of a population: a bar for each client, its height the number of examples, divided by label."""

from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from atoll.ground.printable import count_of
from atoll.simulations.populations.partitions import Ints
from atoll.simulations.populations.report import Report

if TYPE_CHECKING:
    from matplotlib.axes import Axes

LEGEND_MAX = 20
"""Maximum number of labels in a legend; more are shown by a bar of colours."""

NAMES_MAX = 30
"""Maximum number of clients that are shown by their names; more are shown by numbers."""


class NoPlots(RuntimeError):
    """Error: the drawing library is missing; the message says what to install."""


def plot(report: Report, path: Path) -> None:
    """Write the plot to a file, whose suffix selects the format (PNG, SVG, PDF).

    Raises:
        NoPlots: matplotlib is not installed.
        ValueError: matplotlib does not write this format.
        OSError: the file cannot be written.
    """
    try:
        from matplotlib.figure import Figure
    except ImportError as error:
        raise NoPlots("a plot needs matplotlib: pip install 'atoll[sim]'") from error
    figure = Figure(figsize=(9, 4.5), layout="constrained")
    axes = figure.add_subplot()
    _draw(axes, report)
    axes.set(xlabel="client", ylabel="examples", xlim=(-0.5, report.num_clients - 0.5))
    axes.set_ylim(bottom=0)
    if report.num_clients <= NAMES_MAX:
        axes.set_xticks(range(report.num_clients), [summary.client for summary in report.clients], rotation=90)
    axes.set_title(_title(report), fontsize=10)
    figure.savefig(path, dpi=120)


def _draw(axes: "Axes", report: Report) -> None:
    """Draw areas with vertical steps, which is fast for thousands of clients, too."""
    edges = np.arange(report.num_clients + 1) - 0.5
    if report.labels is None:
        examples = np.array([summary.examples for summary in report.clients])
        axes.fill_between(edges, _closed(examples), step="post")
        return
    labels, heights = report.labels.labels, counts(report)
    colours = _colours(len(labels))
    axes.stackplot(edges, _closed(heights), step="post", colors=colours, labels=list(map(str, labels)), linewidth=0)
    if len(labels) <= LEGEND_MAX:
        handles, texts = axes.get_legend_handles_labels()
        axes.legend(handles[::-1], texts[::-1], title="label", loc="center left", bbox_to_anchor=(1, 0.5), fontsize=8)
        return
    from matplotlib.cm import ScalarMappable
    from matplotlib.colors import ListedColormap, Normalize

    mappable = ScalarMappable(Normalize(0, len(labels)), ListedColormap(colours))
    axes.figure.colorbar(mappable, ax=axes, label="label, by its index")


def counts(report: Report) -> Ints:
    """Return the number of examples of each label of each client (L, K)."""
    assert report.labels is not None
    labels = [str(label) for label in report.labels.labels]
    return np.array([[(one.labels or {}).get(label, 0) for one in report.clients] for label in labels], np.int64)


def _closed(heights: Ints) -> Ints:
    """Repeat the last column, because a step ends where the next one begins."""
    return np.concatenate([heights, heights[..., -1:]], axis=-1)


def _colours(number: int) -> list[Any]:
    from matplotlib import colormaps

    if number <= 10:
        return list(colormaps["tab10"].colors[:number])  # type: ignore[attr-defined]
    return list(colormaps["turbo"](np.linspace(0.03, 0.97, number)))


def _title(report: Report) -> str:
    sizes = f"{report.examples_min} to {report.examples_max} examples (median {report.examples_median:g})"
    title = f"{report.kind}: {count_of(report.num_clients, 'client')}, {sizes}"
    if report.labels is None:
        return title
    return f"{title}, mean distance of labels {report.labels.total_variation_mean:.2f}"
