"""Curves of at most 2,000 points: of each interval the least and the largest value, so that no peak is lost. Pure."""

from collections.abc import Iterable, Mapping, Sequence
from typing import Any

POINTS_MAX = 2_000
"""Largest number of points of a thinned curve."""

Document = dict[str, Any]


def thinned(points: Sequence[tuple[int, float | None]], most: int = POINTS_MAX) -> list[tuple[int, float | None]]:
    """Return a curve of at most `most` points, of which the first and the last are kept.

    Between these the places are cut into `most / 2 - 1` intervals of the same number of points, and of each the points
    with the least and the largest value remain, in their order; of an interval without any number its first point. A
    NaN counts as no number.

    Args:
        points: place and value, by ascending place; None: there is no value.
        most: the largest number of points, even and at least 4.
    """
    if len(points) <= most:
        return [*points]
    inner, num = points[1:-1], most // 2 - 1
    found = [points[0]]
    for interval in range(num):
        some = inner[interval * len(inner) // num : (interval + 1) * len(inner) // num]
        numbers = [point for point in some if point[1] is not None and point[1] == point[1]]
        if not numbers:
            found.append(some[0])
            continue
        ends = {min(numbers, key=_value), max(numbers, key=_value)}
        found += sorted(ends)
    return [*found, points[-1]]


def thinned_metrics(metrics: Mapping[int, Mapping[str, Mapping[str, Any]]]) -> Mapping[int, Mapping[str, Document]]:
    """Return the values by version, source and metric, with each metric of each source as a thinned curve.

    What is no number, such as the sums of a task without metrics, remains in the versions that others keep.
    """
    if len(metrics) <= POINTS_MAX:
        return metrics  # type: ignore[return-value]
    lines: dict[tuple[str, str], list[tuple[int, float | None]]] = {}
    for version in sorted(metrics):
        for source, values in metrics[version].items():
            for name, found in values.items():
                number = found if isinstance(found, int | float) else None
                lines.setdefault((source, name), []).append((version, number))
    kept = {key: {version for version, _ in thinned(points)} for key, points in lines.items()}
    return _only(metrics, kept)


def _only(
    metrics: Mapping[int, Mapping[str, Mapping[str, Any]]], kept: Mapping[tuple[str, str], Iterable[int]]
) -> Mapping[int, Mapping[str, Document]]:
    found: dict[int, dict[str, Document]] = {}
    for (source, name), versions in kept.items():
        for version in versions:
            found.setdefault(version, {}).setdefault(source, {})[name] = metrics[version][source][name]
    return dict(sorted(found.items()))


def _value(point: tuple[int, float | None]) -> float:
    assert point[1] is not None
    return point[1]
