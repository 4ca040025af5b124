"""Metrics as sufficient statistics: what is added up over batches, sites and machines before one value is taken.

An accuracy averaged over sites is wrong when sites differ in size; the sums (correct, seen) of all sites give the
accuracy of the pooled data exactly. Statistics are plain tuples of floats by metric name, so that they travel as
values. Sums are correctly rounded (math.fsum), hence independent of the order; of whole numbers they are exact.
"""

import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from fractions import Fraction
from typing import Any

Statistics = dict[str, tuple[float, ...]]
"""Sums by the name of the metric."""


@dataclass(frozen=True, slots=True)
class Metric:
    """A metric whose value is more than total / count, such as a correlation or an F1."""

    statistics: Callable[[Any, Any], Sequence[Any]]
    """(outputs, targets) of one batch -> its sufficient statistics, always of the same length."""

    value: Callable[[tuple[float, ...]], float | None]
    """Their sums -> the value. None, or ZeroDivisionError, when it is undefined."""


Metrics = Mapping[str, Metric | Callable[[Any, Any], Sequence[Any]]]
"""By name: a Metric, or a plain function (outputs, targets) -> (total, count)."""


def of_batch(metrics: Metrics, outputs: Any, targets: Any) -> Statistics:
    """The statistics of one batch."""
    return as_statistics(
        {
            name: (metric.statistics if isinstance(metric, Metric) else metric)(outputs, targets)
            for name, metric in metrics.items()
        }
    )


def as_statistics(raw: Mapping[str, Sequence[Any]]) -> Statistics:
    """Plain tuples of floats, from numbers or one-element arrays of any library.

    Raises:
        ValueError: something is not a sequence of numbers; the message names the metric.
    """
    plain: Statistics = {}
    for name, numbers in raw.items():
        try:
            plain[name] = tuple(float(number) for number in numbers)
        except (TypeError, ValueError) as error:
            raise ValueError(f"metric {name}: expected a tuple of numbers, got {numbers!r}") from error
    return plain


def add(a: Mapping[str, Sequence[float]], b: Mapping[str, Sequence[float]]) -> Statistics:
    """The sums of two."""
    return merge((a, b))


def merge(many: Iterable[Mapping[str, Sequence[float]]]) -> Statistics:
    """The sums of many, whatever their order. A metric that some leave out is summed over the others.

    Raises:
        ValueError: a metric has different lengths; the message names it.
    """
    columns: dict[str, list[Sequence[float]]] = {}
    for statistics in many:
        for name, numbers in statistics.items():
            columns.setdefault(name, []).append(numbers)
    sums: Statistics = {}
    for name in sorted(columns):
        lengths = sorted({len(numbers) for numbers in columns[name]})
        if len(lengths) > 1:
            raise ValueError(f"metric {name}: statistics of different lengths {lengths} cannot be added")
        sums[name] = tuple(total(numbers) for numbers in zip(*columns[name], strict=True))
    return sums


def values(metrics: Metrics, sums: Mapping[str, Sequence[float]]) -> dict[str, float | None]:
    """The value of every metric in `sums`; None where it is undefined.

    Without a `Metric` that says otherwise, two statistics are (total, count) and the value is total / count, None
    when the count is 0; any other number of statistics has no value.
    """
    return {name: _value(metrics.get(name), tuple(numbers)) for name, numbers in sums.items()}


def _value(metric: Metric | Callable[[Any, Any], Sequence[Any]] | None, sums: tuple[float, ...]) -> float | None:
    try:
        if isinstance(metric, Metric):
            return metric.value(sums)
        return sums[0] / sums[1] if len(sums) == 2 else None
    except ZeroDivisionError:
        return None


def total(numbers: Sequence[float]) -> float:
    """The correctly rounded sum, also where math.fsum gives up: infinities and overflow."""
    try:
        return math.fsum(numbers)
    except ValueError:  # infinities of both signs
        return math.nan
    except OverflowError:
        pass
    if not all(map(math.isfinite, numbers)):
        return sum(number for number in numbers if not math.isfinite(number))
    exact = sum(map(Fraction, numbers))
    try:
        return float(exact)
    except OverflowError:
        return math.inf if exact > 0 else -math.inf
