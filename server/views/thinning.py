"""Curves of at most 2,000 points: of each interval the least and the largest value, so that no peak is lost. Pure."""

from collections.abc import Iterable, Mapping, Sequence
from typing import Any

POINTS_MAX = 2_000
"""Largest number of points of a thinned curve."""

Document = dict[str, Any]


def thinned(points: Sequence[tuple[int, float | None]], most: int = POINTS_MAX) -> list[tuple[int, float | None]]:
    """Return a curve of at most `most` points; see `kept`."""
    return [points[place] for place in kept([value for _, value in points], most)]


def kept(values: Sequence[float | None], most: int = POINTS_MAX) -> Sequence[int]:
    """Return the places of the values that a thinned curve keeps, ascending: of at most `most` values all.

    Of more values the first and the last are kept. Between these the places are cut into `most / 2 - 1` intervals of
    the same length, and of each the places of the least and the largest value are kept; of an interval without any
    number its first place. A NaN counts as no number.

    Args:
        values: the values; None: there is none.
        most: the largest number of places, even and at least 4.
    """
    num = len(values)
    if num <= most:
        return range(num)
    intervals = most // 2 - 1
    found = [0]
    for interval in range(intervals):
        begin, end = 1 + interval * (num - 2) // intervals, 1 + (interval + 1) * (num - 2) // intervals
        some = values[begin:end]
        numbers = [value for value in some if value is not None and value == value]
        if not numbers:
            found.append(begin)
            continue
        low, high = begin + some.index(min(numbers)), begin + some.index(max(numbers))
        found += sorted({low, high})
    return [*found, num - 1]


def thinned_metrics(
    of_sources: Mapping[str, Iterable[tuple[int, Mapping[str, Any]]]],
) -> dict[int, dict[str, Document]]:
    """Return the values by version, source and metric, with each metric of each source as a thinned curve.

    A metric's version without a number, such as sums of a task without metrics, counts as a point without a value.

    Args:
        of_sources: by source the versions in order, each with its values by metric.
    """
    found: dict[int, dict[str, Document]] = {}
    for source, rows in of_sources.items():
        lines: dict[str, tuple[list[int], list[Any]]] = {}
        for version, values in rows:
            for name, value in values.items():
                if (line := lines.get(name)) is None:
                    line = lines[name] = ([], [])
                line[0].append(version)
                line[1].append(value)
        for name, (versions, line_values) in lines.items():
            numbers = [value if isinstance(value, float | int) else None for value in line_values]
            for place in kept(numbers):
                found.setdefault(versions[place], {}).setdefault(source, {})[name] = line_values[place]
    return dict(sorted(found.items()))
