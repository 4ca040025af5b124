"""The plots of docs/benchmarks.md, drawn from the rows of its own table.

    python -m benchmarks.plots

    peers   how many times as fast as Flower and pfl-research: every row that names one of them and has a least bar
    loops   how fast beside the tightest loop: every row that names one; a row that gives times of its seconds is
            turned round, so that to the right is faster in all of them

Each plot carries the rows that it was drawn from as its description, so that a test can hold it against the page.
"""

import json
import re
import textwrap
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from benchmarks.processes import ROOT
from benchmarks.report import say

PAGE = ROOT / "docs" / "benchmarks.md"
IMAGES = ROOT / "docs" / "images"
PROCESSORS = ("AMD EPYC", "Intel Xeon")
COLUMNS = ("benchmark", "what is measured", "bar", *PROCESSORS, "date")
COLOURS = dict(zip(PROCESSORS, ("#c2410c", "#1d4ed8"), strict=True))
NOTHING = "–"
LABEL_CHARACTERS = 70

_LINK = re.compile(r"\[`(\w+)`\]\(\.\./benchmarks/(\w+)\.py\)")
_NUMBER = re.compile(r"\d[\d,]*(?:\.\d+)?(?:e-?\d+)?")
_BARS: dict[str, Callable[[float, float], bool]] = {
    "<": lambda figure, bar: figure < bar,
    "≤": lambda figure, bar: figure <= bar,
    "≥": lambda figure, bar: figure >= bar,
    "=": lambda figure, bar: figure == bar,
}


@dataclass(frozen=True, slots=True)
class Row:
    """One row of the table."""

    benchmark: str
    what: str
    bar: str
    figures: tuple[str, ...]  # by processor
    date: str

    @property
    def bar_value(self) -> float | None:
        """The number of the bar; None when there is no bar."""
        return number_of(self.bar)

    def value(self, processor: str) -> float | None:
        """Return the first number of a figure; None without one."""
        return number_of(self.figures[PROCESSORS.index(processor)])

    def is_met(self, processor: str) -> bool | None:
        """Return whether a figure meets the bar; None when either is missing."""
        bar, figure = self.bar_value, self.value(processor)
        return None if bar is None or figure is None else _BARS[self.bar[0]](figure, bar)

    def is_marked(self, processor: str) -> bool:
        """Return whether a figure is bold, the mark of a missed bar."""
        return self.figures[PROCESSORS.index(processor)].startswith("**")


def number_of(cell: str) -> float | None:
    """Return the number that a cell begins with, or None."""
    found = _NUMBER.match(cell.lstrip("*<≤≥= "))
    return None if found is None else float(found[0].replace(",", ""))


def rows_of(page: str) -> list[Row]:
    """Return the rows of the page's table.

    Raises:
        ValueError: a row has other columns, or no link to its script.
    """
    lines = iter(page.splitlines())
    header = "| " + " | ".join(COLUMNS) + " |"
    if header not in lines:
        raise ValueError(f"the page has no table with the columns {', '.join(COLUMNS)}")
    next(lines)
    return list(_rows(lines))


def _rows(lines: Iterator[str]) -> Iterator[Row]:
    for line in lines:
        if not line.startswith("|"):
            return
        cells = [cell.strip() for cell in line.strip("|").split("|")]
        link = _LINK.fullmatch(cells[0])
        if len(cells) != len(COLUMNS) or link is None or link[1] != link[2]:
            raise ValueError(f"not a row: {line}")
        yield Row(link[1], cells[1], cells[2], tuple(cells[3:5]), cells[5])


def of_peers(row: Row) -> bool:
    """Return whether a row belongs to the plot of the peers."""
    return re.search("Flower|pfl-research", row.what) is not None and row.bar.startswith("≥")


def of_loops(row: Row) -> bool:
    """Return whether a row belongs to the plot of the tightest loops."""
    return re.search("tightest loop|reading of the same bytes", row.what) is not None and row.bar_value is not None


def speed(row: Row, value: float) -> float:
    """Return how many times as fast as the other side a figure is."""
    return value if row.bar.startswith("≥") else 1.0 / value


PLOTS: dict[str, tuple[Callable[[Row], bool], str]] = {
    "benchmarks-peers": (of_peers, "times as fast as the peer"),
    "benchmarks-loops": (of_loops, "speed, times the tightest loop's"),
}


def label(row: Row) -> str:
    """Return the text beside a row: what is measured, and against which peer."""
    what, _, other = row.what.replace("`", "").rpartition(": ")
    peer = re.search("Flower|pfl-research", other)
    return textwrap.fill(
        f"{row.benchmark}: {what}" + (f" / {peer[0]}" if peer else ""), LABEL_CHARACTERS, break_on_hyphens=False
    )


def description(rows: Sequence[Row]) -> str:
    """Return the rows as the JSON that a plot carries."""
    return json.dumps([[row.benchmark, row.what, row.bar, *row.figures] for row in rows], ensure_ascii=False)


def draw(rows: Sequence[Row], title: str, path: Path) -> None:
    """Write one plot: a line for each row, a mark for each processor, a tick at the bar."""
    import matplotlib as mpl
    from matplotlib.figure import Figure
    from matplotlib.ticker import FuncFormatter

    with mpl.rc_context({"svg.fonttype": "none", "svg.hashsalt": "atoll", "font.size": 9}):
        figure = Figure(figsize=(9, 1.1 + 0.29 * len(rows)), layout="constrained")
        axes: Any = figure.subplots()
        for place, row in enumerate(rows):
            assert row.bar_value is not None
            axes.plot(speed(row, row.bar_value), place, "|", color="black", markersize=11, markeredgewidth=1.5)
        for processor, marker in zip(PROCESSORS, "os", strict=True):
            found = [(place, row, row.value(processor)) for place, row in enumerate(rows)]
            points = [(speed(row, value), place) for place, row, value in found if value is not None]
            axes.plot(*zip(*points, strict=True), marker, color=COLOURS[processor], label=processor, markersize=5)
        axes.plot([], [], "|", color="black", markersize=11, markeredgewidth=1.5, label="bar")
        axes.set_xscale("log")
        axes.xaxis.set_major_formatter(FuncFormatter(lambda value, _: f"{value:g}"))
        axes.axvline(1.0, color="grey", linewidth=0.8)
        axes.set_yticks(range(len(rows)), [label(row) for row in rows])
        axes.invert_yaxis()
        axes.grid(axis="x", which="both", linewidth=0.3)
        axes.set_xlabel(title)
        figure.legend(loc="outside upper right", ncols=3)
        figure.savefig(path, format="svg", metadata={"Date": None, "Description": description(rows)})


def main() -> None:
    """Draw both plots."""
    rows = rows_of(PAGE.read_text("utf-8"))
    for name, (belongs, title) in PLOTS.items():
        path = IMAGES / f"{name}.svg"
        draw([row for row in rows if belongs(row)], title, path)
        say(f"{path.relative_to(ROOT)}: {path.stat().st_size} bytes")


if __name__ == "__main__":
    main()
