"""Metrics as sufficient statistics: sums that are added over batches, sites and machines before a value is computed.

The mean of the sites' accuracies is wrong if the sites differ in size; the sums (correct, seen) of all sites give the
accuracy of the pooled data exactly. Statistics are plain tuples of floats by metric name, so that they are sent as
values. Sums are correctly rounded (math.fsum), hence independent of the order; sums of whole numbers are exact.
"""

import math
from collections import Counter
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence, Set
from dataclasses import dataclass
from fractions import Fraction
from itertools import chain
from typing import Any, NamedTuple

from atoll.ground.printable import count_of
from atoll.task.errors import TaskBroken
from atoll.task.told import logger

Statistics = dict[str, tuple[float, ...]]
"""Sums by the name of the metric; an empty tuple in place of sums that were refused (`only_finite`)."""

NAME_MAX = 200
"""Most characters of a metric's name."""

LEFT_OUT = "metric '"
"""The first words of each sentence about a metric that is left out."""

METRICS_MAX, SUMS_MAX = 100, 10_000
"""Most metrics of a task, and most sums of all of them together."""

NO_NUMBERS = (str, bytes, bytearray, Mapping, Set)
"""Iterable types that are no sums: the digits of a string, the keys of a table."""

CONTRACT = (
    "a metric returns finite numbers of every batch, (total, count), or those that the `value` of its Metric takes: "
    "correct it, or leave it out of Task(metrics=...)"
)
"""The last words of a refusal."""

NOT_FINITE = "its sums are NaN, infinite or left out"
"""The reason of a refusal, also for a metric that breaks the contract, whose fault is in the log."""


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
    """Return the statistics of one batch.

    A metric that fails, or returns no numbers, is refused: its sums are empty, the log says why, and the training that
    it measures continues.
    """
    found: Statistics = {}
    for name, metric in metrics.items():
        try:
            found[name] = _sums_of(metric, outputs, targets)
        except Exception as error:
            found[name] = _refused(name, _words(error))
    return found


class Tried(NamedTuple):
    """The sums of a metric of one batch."""

    sums: tuple[float, ...]
    fault: str = ""
    """The reason why the sums, or their value, break the contract of metrics; empty: they keep it."""
    way_out: str = CONTRACT


def tried(metric: "Metric | Callable[..., Any]", outputs: Any, targets: Any, room: int = SUMS_MAX) -> Tried:
    """Return the sums of a metric of one batch, and the fault by which they break the contract.

    Args:
        metric: a plain function, or a `Metric`.
        outputs: the outputs of the model, without gradients.
        targets: the targets of the same batch.
        room: the number of sums that the metrics before it have left.
    """
    try:
        sums = _sums_of(metric, outputs, targets)
    except Exception as error:
        return Tried((), _words(error))
    if not sums:
        return Tried((), "it returns no numbers")
    if fault := contract_fault(metric, sums, room):
        return Tried(sums, *fault.split(": ", 1))
    if not all(map(math.isfinite, sums)):
        return Tried(sums, f"it gives {sums!r:.100}, which are not all finite")
    try:
        _value(metric, sums)
    except Exception as error:
        return Tried(sums, _words_of_value(sums, error))
    return Tried(sums)


def different_lengths(lengths: Iterable[int]) -> str:
    """Return the sentence about a metric whose batches differ in their number of sums; empty if they agree."""
    found = sorted(set(lengths))
    return _of_lengths([(0.0,) * length for length in found]) if len(found) > 1 else ""


def _sums_of(metric: "Metric | Callable[..., Any]", outputs: Any, targets: Any) -> tuple[float, ...]:
    return _as_sums((metric.statistics if isinstance(metric, Metric) else metric)(outputs, targets))


def _as_sums(numbers: Any) -> tuple[float, ...]:
    """Return numbers of any library as floats.

    Raises:
        TaskBroken: they are something else, such as a string, which Python would read digit by digit.
    """
    try:
        if isinstance(numbers, NO_NUMBERS):
            raise TypeError
        every = tuple(numbers)
        if any(isinstance(number, str | bytes) for number in every):
            raise TypeError
        return tuple(map(float, every))
    except (TypeError, ValueError) as error:
        raise TaskBroken(f"expected a tuple of numbers, got {numbers!r:.200}") from error


def sound(metrics: Metrics, statistics: Mapping[str, Sequence[float]]) -> Statistics:
    """Return a job's statistics without invalid sums.

    An empty tuple replaces sums that are not finite or break the contract of metrics; the log has the reason.
    """
    room, found = SUMS_MAX, only_finite(statistics)
    for name, sums in found.items():
        if sums and (fault := contract_fault(metrics.get(name), sums, room)):
            found[name] = _refused(name, fault)
        room -= len(found[name])
    return found


def contract_fault(metric: "Metric | Callable[..., Any] | None", sums: Sequence[float], room: int = SUMS_MAX) -> str:
    """Return the reason that sums break the contract of metrics; empty: they keep it.

    A plain metric has two, total and count; a `Metric` has any number, and its `value` takes them. All metrics together
    have at most `SUMS_MAX`.

    Args:
        metric: the metric that returned the sums.
        sums: the sums of at least one batch.
        room: the number of sums that the metrics before it have left.
    """
    if len(sums) > room:
        return f"it has {count_of(len(sums), 'sum')}, and all metrics together may have {SUMS_MAX}: send fewer"
    if not isinstance(metric, Metric):
        several = f"it returns {count_of(len(sums), 'number')}, and a plain metric returns two, (total, count)"
        return "" if len(sums) == 2 else f"{several}: make it a Metric, whose `value` says what they mean"
    return ""


def _words(error: BaseException) -> str:
    return str(error) if isinstance(error, TaskBroken) else f"it raises {type(error).__name__}: {error}"[:NAME_MAX]


def _words_of_value(sums: tuple[float, ...], error: BaseException) -> str:
    return f"of its sums {sums!r:.100}, {_words(error).replace('it raises', 'value raises')}"


def _refused(name: str, fault: str) -> tuple[float, ...]:
    """Log the fault of a metric once for each process, and return empty sums."""
    if (sentence := f"metric {name!r} is left out: {fault}") not in _named and len(_named) < METRICS_MAX:
        _named.add(sentence)
        logger.warning("%s", sentence)
    return ()


_named: set[str] = set()


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
            plain[name] = _as_sums(numbers)
        except TaskBroken as error:
            raise TaskBroken(f"metric {name}: {error}") from error
    return plain


def only_finite(statistics: Mapping[str, Sequence[float]]) -> Statistics:
    """Return the statistics with an empty tuple in place of sums that are not finite.

    Added to other batches or sites they would make the total NaN, and hide its cause.
    """
    return {name: tuple(sums) if all(map(math.isfinite, sums)) else () for name, sums in statistics.items()}


def names_refused(statistics: Mapping[str, Sequence[float]]) -> list[str]:
    """Return the sorted names of the metrics whose sums were refused."""
    return sorted(name for name, sums in statistics.items() if not len(sums))


def why_refused(statistics: Mapping[str, Sequence[float]]) -> str:
    """Return the reason of each refusal, in words; empty: there is none."""
    return "; ".join(f"metric {name[:100]!r}: {NOT_FINITE}" for name in names_refused(statistics))


def add(a: Mapping[str, Sequence[float]], b: Mapping[str, Sequence[float]]) -> Statistics:
    """Return the sums of two parts of one site's data.

    A metric that is refused in one part, or differs in length, is refused in the sum, which else would omit a part of
    the data.
    """
    sums = {name: tuple(numbers) for name, numbers in a.items()}
    for name, numbers in b.items():
        first = sums.get(name)
        if first is None:
            sums[name] = tuple(numbers)
        elif len(first) == len(numbers):
            sums[name] = tuple(x + y for x, y in zip(first, numbers, strict=True))
        else:
            sums[name] = _refused(name, _of_lengths((first, numbers))) if first and numbers else ()
    return dict(sorted(sums.items()))


def of_parts(parts: Iterable[Mapping[str, Sequence[float]]]) -> Statistics:
    """Return the sums of any number of parts of one site's data, in any order; refused as in `add`."""
    columns = _columns(parts)
    sums: Statistics = {}
    for name, found in columns.items():
        is_one = all(found) and len({len(numbers) for numbers in found}) == 1
        sums[name] = tuple(map(total, zip(*found, strict=True))) if is_one else ()
        if not is_one and all(found):
            _refused(name, _of_lengths(found))
    return sums


def _of_lengths(found: Iterable[Sequence[float]]) -> str:
    lengths = " and ".join(map(str, sorted({len(numbers) for numbers in found})))
    return f"its batches have {lengths} sums; return the same number for each, such as bincount(..., minlength=classes)"


def _columns(statistics: Iterable[Mapping[str, Sequence[float]]]) -> dict[str, list[Sequence[float]]]:
    columns: dict[str, list[Sequence[float]]] = {}
    for summand in statistics:
        for name, numbers in summand.items():
            columns.setdefault(name, []).append(numbers)
    return dict(sorted(columns.items()))


def usual_lengths(statistics: Iterable[Mapping[str, Sequence[float]]]) -> dict[str, int]:
    """Return the number of sums of each metric: the most common number, of equally common numbers the least."""
    counts = {name: Counter(map(len, filter(len, found))) for name, found in _columns(statistics).items()}
    return {name: min(of, key=lambda length: (-of[length], length)) for name, of in counts.items() if of}


def merge_alike(statistics: Collection[Mapping[str, Sequence[float]]]) -> Statistics | None:
    """Return the sums of statistics of equal form, as nearly all are; None if some differ.

    Of equal form: the same metrics in one order, each with the same number of sums; none is refused, all are finite.
    """
    first = next(iter(statistics), None)
    if first is None:
        return None
    names, lengths = [*first], [*map(len, first.values())]
    if not all(lengths) or not all([*each] == names and [*map(len, each.values())] == lengths for each in statistics):
        return None
    sums = {name: tuple(map(total, zip(*(each[name] for each in statistics), strict=True))) for name in names}
    return sums if all(map(math.isfinite, chain.from_iterable(sums.values()))) else None


def merge(statistics: Iterable[Mapping[str, Sequence[float]]]) -> Statistics:
    """Return the sums over sites, of any number and in any order.

    Each metric is summed over the sites that have its usual number of sums (`usual_lengths`); it may be missing or
    refused at others.
    """
    every = list(statistics)
    if (alike := merge_alike(every)) is not None:
        return dict(sorted(alike.items()))
    usual, sums = usual_lengths(every), Statistics()
    for name, found in _columns(every).items():
        columns = [numbers for numbers in found if numbers and len(numbers) == usual[name]]
        sums[name] = tuple(map(total, zip(*columns, strict=True)))
    return sums


def values(metrics: Metrics, sums: Mapping[str, Sequence[float]]) -> dict[str, float | None]:
    """Return the value of every metric in `sums`; None where it is undefined or its sums were refused.

    Without a `Metric`, two statistics are (total, count) with the value total / count, undefined if the count is 0; any
    other number of statistics has no value. A `Metric` whose `value` fails has none, and the log says why. The task's
    metrics come first, in its order.
    """
    found: dict[str, float | None] = {}
    for name in [*(name for name in metrics if name in sums), *(name for name in sums if name not in metrics)]:
        numbers = sums[name]
        try:
            found[name] = _value(metrics.get(name), tuple(numbers))
        except Exception as error:
            found[name] = None
            _refused(name, _words_of_value(tuple(numbers), error))
    return found


def finite(values: Mapping[str, float | None]) -> dict[str, float | None]:
    """Return the values with None in place of values that are not finite, which cannot be compared."""
    return {name: value if value is not None and math.isfinite(value) else None for name, value in values.items()}


def _value(metric: Metric | Callable[[Any, Any], Sequence[Any]] | None, sums: tuple[float, ...]) -> float | None:
    if not sums:
        return None
    try:
        if isinstance(metric, Metric):
            found = metric.value(sums)
            if isinstance(found, str | bytes):
                raise TaskBroken(f"value must return a number or None, got {found!r:.100}")
            return None if found is None else float(found)
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
    """Return whether smaller values of a metric are better, as of a loss, an error or a perplexity."""
    name = metric.rpartition("/")[2].lower()
    return any(word in name for word in ("loss", "error", "perplexity", "mse", "mae"))
