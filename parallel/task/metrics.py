"""Metrics as sufficient statistics: sums that are added over batches, sites and machines before a value is computed.

The mean of the sites' accuracies is wrong if the sites differ in size; the sums (correct, seen) of all sites give the
accuracy of the pooled data exactly. Statistics are plain tuples of floats by metric name, so that they travel as
values. Sums are correctly rounded (math.fsum), hence independent of the order; sums of whole numbers are exact.
"""

import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from fractions import Fraction
from typing import Any

from atoll.parallel.task.errors import TaskBroken

Statistics = dict[str, tuple[float, ...]]
"""Sums by the name of the metric; an empty tuple in place of sums that were refused (`only_finite`)."""

NAME_MAX = 200
"""Most characters of a metric's name."""

NOT_FINITE = "its sums are NaN or infinite"
"""The reason of a refusal."""


@dataclass(frozen=True, slots=True)
class Metric:
    """A metric whose value is more than total / count, such as an F1 score, a correlation or an AUC.

    The F1 score from (true positives, predicted positives, positives) of each batch:

        Metric(statistics=count_positives, value=lambda sums: 2 * sums[0] / (sums[1] + sums[2]))
    """

    statistics: Callable[[Any, Any], Sequence[Any]]
    """(outputs, targets) of one batch -> its sufficient statistics, always of the same length."""

    value: Callable[[tuple[float, ...]], float | None]
    """The sums of the statistics -> the value. Undefined if it returns None or raises ZeroDivisionError."""


Metrics = Mapping[str, Metric | Callable[[Any, Any], Sequence[Any]]]
"""Metrics by name: a `Metric`, or a plain function (outputs, targets) -> (total, count)."""


def of_batch(metrics: Metrics, outputs: Any, targets: Any) -> Statistics:
    """Return the statistics of one batch."""
    return as_statistics(
        {
            name: (metric.statistics if isinstance(metric, Metric) else metric)(outputs, targets)
            for name, metric in metrics.items()
        }
    )


def is_name(name: object) -> bool:
    """Return whether a value can name a metric: text that prints on one line, of 1 to `NAME_MAX` characters."""
    return isinstance(name, str) and 0 < len(name) <= NAME_MAX and name.isprintable()


def name_fault(name: object) -> str:
    """Return the sentence about a value that cannot name a metric."""
    return f"metrics: the name {str(name)[:NAME_MAX]!r}; allowed: 1 to {NAME_MAX} printable characters"


def as_statistics(raw: Mapping[str, Sequence[Any]]) -> Statistics:
    """Convert numbers, or one-element arrays of any library, to plain tuples of floats.

    Raises:
        TaskBroken: the value of a metric is no sequence of numbers, or its name does not print; the message names it.
    """
    plain: Statistics = {}
    for name, numbers in raw.items():
        if not is_name(name):
            raise TaskBroken(name_fault(name))
        try:
            plain[name] = tuple(float(number) for number in numbers)
        except (TypeError, ValueError) as error:
            raise TaskBroken(f"metric {name}: expected a tuple of numbers, got {numbers!r}") from error
    return plain


def only_finite(statistics: Mapping[str, Sequence[float]]) -> Statistics:
    """Return the statistics with an empty tuple in place of sums that are not finite.

    Added to those of other batches or sites they would make the whole NaN, and hide where it comes from.
    """
    return {name: tuple(sums) if all(map(math.isfinite, sums)) else () for name, sums in statistics.items()}


def names_refused(statistics: Mapping[str, Sequence[float]]) -> list[str]:
    """Return the sorted names of the metrics whose sums were refused."""
    return sorted(name for name, sums in statistics.items() if not len(sums))


def why_refused(statistics: Mapping[str, Sequence[float]]) -> str:
    """Return the reason of each refusal, in words; empty: there is none."""
    return "; ".join(f"metric {name[:100]!r}: {NOT_FINITE}" for name in names_refused(statistics))


def add(a: Mapping[str, Sequence[float]], b: Mapping[str, Sequence[float]]) -> Statistics:
    """Return the sums of two statistics."""
    return merge((a, b))


def merge(statistics: Iterable[Mapping[str, Sequence[float]]]) -> Statistics:
    """Return the sums of any number of statistics, in any order. A metric may be missing or refused in some of them.

    Raises:
        TaskBroken: a metric has different lengths; the message names it.
    """
    columns: dict[str, list[Sequence[float]]] = {}
    for summand in statistics:
        for name, numbers in summand.items():
            columns.setdefault(name, []).append(numbers)
    sums: Statistics = {}
    for name in sorted(columns):
        columns[name] = [numbers for numbers in columns[name] if len(numbers)]
        lengths = sorted({len(numbers) for numbers in columns[name]})
        if len(lengths) > 1:
            raise TaskBroken(f"metric {name}: statistics of different lengths {lengths} cannot be added")
        sums[name] = tuple(total(numbers) for numbers in zip(*columns[name], strict=True))
    return sums


def values(metrics: Metrics, sums: Mapping[str, Sequence[float]]) -> dict[str, float | None]:
    """Return the value of every metric in `sums`; None where it is undefined or its sums were refused.

    Without a `Metric`, two statistics are (total, count) with the value total / count, undefined if the count is 0; any
    other number of statistics has no value. The task's metrics come first, in its order.
    """
    names = [*(name for name in metrics if name in sums), *(name for name in sums if name not in metrics)]
    return {name: _value(metrics.get(name), tuple(sums[name])) for name in names}


def finite(values: Mapping[str, float | None]) -> dict[str, float | None]:
    """Return the values with None in place of those that are not finite: they can be compared with nothing."""
    return {name: value if value is not None and math.isfinite(value) else None for name, value in values.items()}


def _value(metric: Metric | Callable[[Any, Any], Sequence[Any]] | None, sums: tuple[float, ...]) -> float | None:
    if not sums:
        return None
    try:
        if isinstance(metric, Metric):
            return metric.value(sums)
        return sums[0] / sums[1] if len(sums) == 2 else None
    except ZeroDivisionError:
        return None


def total(numbers: Sequence[float]) -> float:
    """Return the correctly rounded sum, also where math.fsum fails: with infinities and overflow."""
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


def is_loss(metric: str) -> bool:
    """Return whether smaller values of a metric are better: of a loss, an error or a perplexity."""
    name = metric.rpartition("/")[2].lower()
    return any(word in name for word in ("loss", "error", "perplexity", "mse", "mae"))
