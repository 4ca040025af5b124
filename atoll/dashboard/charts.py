"""The geometry of pictures: curves over versions, and the bars of a round's clients; pure, in units of an SVG."""

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

WIDTH, HEIGHT = 640, 200
LEFT, RIGHT, TOP, BOTTOM = 62, 14, 10, 26
"""Margins of a picture: the labels of its axes are there."""

COLOURS = 6
"""Number of colours of curves; further curves repeat them, dashed."""

CURVES_MAX = 50
"""Largest number of curves of a page."""

BARS_WIDTH = 960
"""Width of the picture of a round's bars."""

ROW = 24
"""Height of a bar with its gap."""

NAME = 130
"""Width of the names beside bars."""

Point = tuple[float, float | None]


@dataclass(frozen=True)
class Line:
    """A curve of a picture.

    Args:
        name: its name.
        paths: its pieces, each the points of a polyline; a gap is between two.
        newest: its newest value, as a text.
        number: its place among the curves, which gives its colour and dashes.
    """

    name: str
    paths: Sequence[str]
    newest: str
    number: int

    @property
    def colour(self) -> str:
        """The class of its colour."""
        return f"c{self.number % COLOURS}"

    @property
    def dashes(self) -> str:
        """The dashes of the curve; empty: none."""
        return "" if self.number < COLOURS else "6 3" if self.number < 2 * COLOURS else "2 3"


@dataclass(frozen=True)
class Tick:
    """A label at an axis."""

    at: float
    text: str


@dataclass(frozen=True)
class Chart:
    """A picture of curves.

    Args:
        title: what is drawn, such as `accuracy`.
        over: what the horizontal axis counts, such as `version`.
        lines: the curves.
        xs, ys: the labels of the axes.
    """

    title: str
    over: str
    lines: Sequence[Line]
    xs: Sequence[Tick]
    ys: Sequence[Tick]
    width: int = WIDTH
    height: int = HEIGHT

    @property
    def left(self) -> int:
        """The left end of the horizontal lines."""
        return LEFT

    @property
    def right(self) -> int:
        """The right end of the horizontal lines."""
        return self.width - RIGHT

    @property
    def sentence(self) -> str:
        """The picture in a sentence, for readers of screens."""
        newest = ", ".join(f"{line.name} {line.newest}" for line in self.lines)
        return f"{self.title} over {self.over} {self.xs[0].text} to {self.xs[-1].text}: newest {newest}"


@dataclass(frozen=True)
class Part:
    """A part of a bar: from `x` on, `width` wide, of a kind that has a colour and a word."""

    x: float
    width: float
    kind: str
    text: str


@dataclass(frozen=True)
class Bar:
    """The bar of one client."""

    name: str
    y: float
    parts: Sequence[Part]
    end: str
    mark: str


@dataclass(frozen=True)
class Bars:
    """The bars of a round; `rules` are vertical lines with a label, such as the deadline."""

    bars: Sequence[Bar]
    rules: Sequence[Tick]
    ticks: Sequence[Tick]
    height: float
    width: int = BARS_WIDTH


def chart(title: str, over: str, curves: Mapping[str, Sequence[Point]]) -> Chart | None:
    """Return a picture of curves; None: no curve has a finite value.

    Args:
        title: what is drawn.
        over: what the horizontal axis counts.
        curves: the points of each curve, ascending; None or a value that is not finite is a gap.
    """
    finite = {
        name: [(x, y) for x, y in points if y is not None and math.isfinite(y)] for name, points in curves.items()
    }
    drawn = {name: curves[name] for name, points in finite.items() if points}
    if not drawn:
        return None
    every = [point for name in drawn for point in finite[name]]
    xs, ys = _scale([x for x, _ in every]), _scale([y for _, y in every], is_padded=True)
    x_of, y_of = _map(xs, LEFT, WIDTH - RIGHT), _map(ys, HEIGHT - BOTTOM, TOP)
    lines = []
    for number, (name, points) in enumerate(drawn.items()):
        paths, piece = [], list[str]()
        for x, y in points:
            if y is None or not math.isfinite(y):
                paths.append(piece)
                piece = []
            else:
                piece.append(f"{x_of(x):.1f},{y_of(y):.1f}")
        paths.append(piece)
        joined = [" ".join(each if len(each) > 1 else each * 2) for each in paths if each]
        lines.append(Line(name, joined, f"{finite[name][-1][1]:.4g}", number))
    return Chart(
        title,
        over,
        lines,
        [Tick(x_of(x), f"{x:g}") for x in _ticks(*xs, 6, whole=True)],
        [Tick(y_of(y), f"{y:.4g}") for y in _ticks(*ys, 4)],
    )


def bars(
    clients: Sequence[tuple[str, float, Sequence[tuple[str, float, float]], str]],
    begin: float,
    end: float,
    rules: Mapping[str, float],
) -> Bars:
    """Return the bars of a round.

    Args:
        clients: for each its name, the end of its bar [s], its parts (kind, begin [s], end [s]), and its fate.
        begin: the instant of the left end [s].
        end: the instant of the right end [s].
        rules: the instants of vertical lines by name [s]; one beyond the end is left out.
    """
    span = max(end - begin, 1e-3)
    x_of = _map((begin, begin + span), NAME, BARS_WIDTH - 90)
    found = []
    for number, (name, last, parts, fate) in enumerate(clients):
        drawn = [
            Part(x_of(first), max(1.0, x_of(until) - x_of(first)), kind, f"{kind} {until - first:.2f} s")
            for kind, first, until in parts
            if until > first
        ]
        found.append(Bar(name, 20 + number * ROW, drawn, f"{max(0.0, last - begin):.1f} s", fate))
    lines = [Tick(x_of(at), name) for name, at in rules.items() if begin <= at <= begin + span]
    ticks = [Tick(x_of(begin + at), f"{at:g} s") for at in _ticks(0.0, span, 6)]
    return Bars(found, lines, ticks, 20 + len(found) * ROW + 22)


def _scale(values: Sequence[float], *, is_padded: bool = False) -> tuple[float, float]:
    low, high = min(values), max(values)
    if high <= low:
        room = abs(low) / 10 or 0.5
        return low - room, high + room
    room = (high - low) / 20 if is_padded else 0.0
    return low - room, high + room


def _map(span: tuple[float, float], first: float, last: float) -> Callable[[float], float]:
    """Return the linear map of a span of values to the places from `first` to `last`."""
    low, factor = span[0], (last - first) / (span[1] - span[0])
    return lambda value: first + (value - low) * factor


def _ticks(low: float, high: float, most: int, *, whole: bool = False) -> list[float]:
    """Return at most about `most` round values from `low` to `high`, at least two."""
    rough = (high - low) / most
    power = 10.0 ** math.floor(math.log10(rough))
    step = next(factor * power for factor in (1, 2, 5, 10) if factor * power >= rough)
    step = max(step, 1.0) if whole else step
    first = math.ceil(low / step)
    found = [number * step for number in range(first, first + 2 * most) if number * step <= high + step * 1e-9]
    return found if len(found) > 1 else [low, high]
