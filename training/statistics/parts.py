"""The statistics of one site's data in parts, each of which is merged exactly with other sites' parts. Pure.

A part has a place: split, group and name, such as ("train", "features", "age"). The groups:

    examples    Numbers     the number of examples of the split
    labels      Histogram   whole-number targets: label -> number of occurrences
    targets     Moments     moments of float targets
    features    Moments     count, missing, sum, sum of squares, least, greatest of a feature
    own         Numbers     the results of `Task(statistics=...)`, by name
    target_bins, feature_bins
                Histogram   values in the bins of a secure sum's layout (`question`), by the index of the bin

Sums are exact (`exact`): merged parts depend neither on the order of the sites nor on the division of the data among
them, and the mean and the variance are equal to the pooled data's, correctly rounded.
"""

from collections import Counter
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from fractions import Fraction
from typing import Any

from atoll.training.statistics.exact import rounded, text_of

Place = tuple[str, str, str]
"""Split, group and name; the name may be empty."""

SPLITS = ("train", "test")
GROUPS = ("examples", "labels", "targets", "features", "own", "target_bins", "feature_bins")
MERGES = ("sum", "count", "min", "max")
"""The rules by which numbers are merged; a count is a sum of numbers of examples, and subject to small cells."""

FEATURES_MAX = 1000
"""Most features of a split with separate moments; a tensor with more elements is one feature."""

LABELS_MAX = 1000
"""Most different labels of one histogram."""

NUMBERS_MAX = 10_000
"""Most numbers of a task's custom statistics in one split."""

NAMES_MAX, NAME_LETTERS_MAX = 1100, 200
"""Largest number of parts of one split and one group, and largest length of a name."""


@dataclass(frozen=True, slots=True)
class Numbers:
    """Numbers with one rule of merging, in the order of a C array of their shape; None: left out as a small cell."""

    merge: str
    shape: tuple[int, ...]
    values: tuple[Fraction | None, ...]

    @property
    def form(self) -> tuple[Any, ...]:
        """The part's kind and shape, which must be equal before parts can be merged."""
        return ("numbers", self.merge, self.shape)

    def plain(self) -> dict[str, Any]:
        """Return the part in JSON types, with exact numbers."""
        values = [None if value is None else text_of(value) for value in self.values]
        return {"kind": "numbers", "merge": self.merge, "shape": list(self.shape), "values": values}

    def shown(self) -> dict[str, Any]:
        """Return the part for a reader: numbers that are whole stay whole, others are the nearest float64."""
        flat = [None if value is None else _shown(value) for value in self.values]
        return {"merge": self.merge, "value": _nested(flat, self.shape)}


@dataclass(frozen=True, slots=True)
class Histogram:
    """The number of occurrences of each label."""

    cells: Mapping[str, int]
    num_withheld: int = 0
    """Labels that sites have left out because few examples have them; other counts are then lower limits."""

    @property
    def form(self) -> tuple[Any, ...]:
        """The part's kind and shape, which must be equal before parts can be merged."""
        return ("histogram",)

    def plain(self) -> dict[str, Any]:
        """Return the part in JSON types, with exact numbers."""
        return {"kind": "histogram", "cells": dict(self.cells), "withheld": self.num_withheld}

    def shown(self) -> dict[str, Any]:
        """Return the part for a reader, labels in order."""
        return {"counts": {label: self.cells[label] for label in sorted(self.cells, key=_order)}} | (
            {"withheld": self.num_withheld} if self.num_withheld else {}
        )


@dataclass(frozen=True, slots=True)
class Moments:
    """The moments of a feature as exact sums over its finite values."""

    count: int
    """Number of finite values."""
    missing: int
    """Number of values that are NaN."""
    infinite: int
    total: Fraction
    squares: Fraction
    least: float | None = None
    """Least value; None: there are no values, or a site withholds it."""
    greatest: float | None = None

    @property
    def form(self) -> tuple[Any, ...]:
        """The part's kind and shape, which must be equal before parts can be merged."""
        return ("moments",)

    @property
    def mean(self) -> float | None:
        """The mean, total / count, correctly rounded; None without values."""
        return rounded(self.total / self.count) if self.count else None

    @property
    def variance(self) -> float | None:
        """The variance squares / count - (total / count)^2, which divides by the count, correctly rounded."""
        if not self.count:
            return None
        return rounded((self.count * self.squares - self.total**2) / self.count**2)

    def plain(self) -> dict[str, Any]:
        """Return the part in JSON types, with exact numbers."""
        return {
            "kind": "moments",
            "count": self.count,
            "missing": self.missing,
            "infinite": self.infinite,
            "sum": text_of(self.total),
            "squares": text_of(self.squares),
            "min": self.least,
            "max": self.greatest,
        }

    def shown(self) -> dict[str, Any]:
        """Return the part for a reader: the nearest float64 of each number."""
        extremes = {"min": self.least, "max": self.greatest}
        return {
            "count": self.count,
            "missing": self.missing,
            "infinite": self.infinite,
            "sum": rounded(self.total),
            "sum_of_squares": rounded(self.squares),
            "mean": self.mean,
            "variance": self.variance,
        } | {name: value for name, value in extremes.items() if value is not None}


Part = Numbers | Histogram | Moments


@dataclass(frozen=True, slots=True)
class SiteStatistics:
    """The data statistics of one site, in parts."""

    parts: Mapping[Place, Part]
    withheld: Mapping[Place, str] = field(default_factory=dict)
    """Parts that are left out, each with the reason."""

    def plain(self) -> dict[str, Any]:
        """Return the answer in JSON types, exactly."""
        parts = [[*place, part.plain()] for place, part in self.parts.items()]
        return {"parts": parts, "withheld": [[*place, why] for place, why in self.withheld.items()]}


def count(number: int) -> Numbers:
    """Make the part that holds a split's number of examples."""
    return Numbers("count", (), (Fraction(number),))


def merged(parts: Iterable[Part]) -> Part:
    """Merge one or more parts with equal `form` into one."""
    first, *others = parts
    if isinstance(first, Numbers):
        return _merged_numbers([first, *(part for part in others if isinstance(part, Numbers))])
    if isinstance(first, Histogram):
        return _merged_histograms([first, *(part for part in others if isinstance(part, Histogram))])
    return _merged_moments([first, *(part for part in others if isinstance(part, Moments))])


def _merged_numbers(parts: list[Numbers]) -> Numbers:
    rule = {"min": min, "max": max}.get(parts[0].merge, sum)
    columns = zip(*(part.values for part in parts), strict=True)
    values = (None if None in column else Fraction(rule(column)) for column in columns)
    return Numbers(parts[0].merge, parts[0].shape, tuple(values))


def _merged_histograms(parts: list[Histogram]) -> Histogram:
    cells: Counter[str] = Counter()
    for part in parts:
        cells.update(part.cells)
    return Histogram(dict(cells), sum(part.num_withheld for part in parts))


def _merged_moments(parts: list[Moments]) -> Moments:
    filled = [part for part in parts if part.count]
    least, greatest = [part.least for part in filled], [part.greatest for part in filled]
    return Moments(
        sum(part.count for part in parts),
        sum(part.missing for part in parts),
        sum(part.infinite for part in parts),
        sum((part.total for part in parts), Fraction()),
        sum((part.squares for part in parts), Fraction()),
        None if None in least or not least else min(value for value in least if value is not None),
        None if None in greatest or not greatest else max(value for value in greatest if value is not None),
    )


def _shown(value: Fraction) -> float | int | None:
    return int(value) if value.denominator == 1 and abs(value) <= 2**53 else rounded(value)


def _nested(flat: list[Any], shape: tuple[int, ...]) -> Any:
    """Return a flat list as nested lists of a shape; for an empty shape its single value."""
    if not shape:
        return flat[0]
    size = len(flat) // shape[0] if shape[0] else 0
    return [_nested(flat[start * size : (start + 1) * size], shape[1:]) for start in range(shape[0])]


def _order(label: str) -> tuple[bool, int, str]:
    is_number = label.lstrip("-").isdecimal()
    return not is_number, int(label) if is_number else 0, label
