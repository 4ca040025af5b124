"""The layout of statistics that are added in a secure sum: splits, labels, features with their ranges and bins. Pure.

The layout is stated before any site works, as sites can add only numbers at the same places. A site's numbers, in
order, for each split:

    examples        present, count
    each label      present, cells left out, count of each label 0 .. k - 1, count of all other labels
    each column     present, count, missing, outside, total, squares;  present, cells left out, count of each bin

`present` is 1 if the site gives the part, and all other numbers of an absent part are 0. A column's moments are over
its values within the first and the last edge; others, infinite ones included, are counted as outside. So nothing that a
site refuses depends on its values. The total and the squares are whole numbers of steps:

    steps of 2^-(74 - e) and 2^-(74 - 2 e),    |v| <= 2^e within the edges,    at most 2^40 rows

A site rounds once, to the nearest step, and each number has at most 115 bits.
"""

import hashlib
import json
import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass
from fractions import Fraction
from itertools import pairwise
from typing import Any

from atoll.ground.printable import count_of, some_of
from atoll.ground.strict_json import (
    ManifestError,
    check_canonical,
    fields_of,
    integer,
    items_of,
    one_of,
    read_object,
    refuse,
    text,
)
from atoll.training.statistics.parts import (
    FEATURES_MAX,
    LABELS_MAX,
    NAME_LETTERS_MAX,
    SPLITS,
    Histogram,
    Moments,
    Numbers,
    Part,
    Place,
    SiteStatistics,
    count,
)

ROWS_BITS = 40
"""A split has at most 2^40 rows."""
NUMBER_BITS = 114
"""A site's number is at most 2^114 steps: 64 sites stay within the two words of a number."""
EXPONENT_MAX = (NUMBER_BITS - ROWS_BITS) // 2
"""An edge is at most 2^37, so that squares have steps of at most 1."""
NUMBERS_MAX = 10_000
"""Most numbers of a layout: the words of them are one message."""
EDGES_MAX = 1001
BYTES_MAX = 512 * 1024
OTHER = "other"
"""The cell of labels beyond those of the layout."""

Edges = tuple[float, ...]


class OtherLayout(ValueError):
    """Error: a site's data does not have what the layout names; the message has the part and no value."""


@dataclass(frozen=True, slots=True)
class Question:
    """What a secure sum of statistics adds, in the order of its numbers.

    Attributes:
        splits: of the data.
        labels: targets of whole numbers, each with its number of classes.
        targets: float targets, each with the edges of its bins; the first and the last are its range.
        features: as targets.
        seed: of the planned run, with which the data is read.
    """

    splits: tuple[str, ...]
    labels: tuple[tuple[str, int], ...] = ()
    targets: tuple[tuple[str, Edges], ...] = ()
    features: tuple[tuple[str, Edges], ...] = ()
    seed: int = 0

    @property
    def text(self) -> str:
        """The layout as canonical JSON; a request has it beside the terms of the sum."""
        return json.dumps(asdict(self), sort_keys=True, separators=(",", ":"), allow_nan=False)

    @property
    def digest(self) -> str:
        """SHA-256 of the layout, which the terms of the sum have."""
        return hashlib.sha256(self.text.encode()).hexdigest()

    @property
    def edges(self) -> dict[tuple[str, str], Edges]:
        """The edges of each column, by group and name."""
        groups = (("targets", self.targets), ("features", self.features))
        return {(group, name): edges for group, columns in groups for name, edges in columns}

    @property
    def num_numbers(self) -> int:
        """Number of a site's numbers."""
        of_columns = sum(7 + len(edges) for edges in self.edges.values())
        return len(self.splits) * (2 + sum(3 + classes for _, classes in self.labels) + of_columns)

    def places(self) -> Iterator[tuple[Place, Sequence[str]]]:
        """Yield the place of each part in order, with the cells of a histogram."""
        for split in self.splits:
            yield (split, "examples", ""), ()
            for name, classes in self.labels:
                yield (split, "labels", name), (*map(str, range(classes)), OTHER)
            for (group, name), edges in self.edges.items():
                yield (split, group, name), ()
                yield (split, bins_of(group), name), tuple(map(str, range(len(edges) - 1)))

    def in_words(self) -> str:
        """Return the layout as a phrase for the log of a site."""
        found = [f"{' and '.join(self.splits)}: examples"]
        found += [f"labels of {name} ({classes})" for name, classes in self.labels]
        found += [
            f"{name} within {edges[0]:g} to {edges[-1]:g} ({count_of(len(edges) - 1, 'bin')})"
            for (_, name), edges in self.edges.items()
        ]
        return some_of(found)


def bins_of(group: str) -> str:
    """Return the group of the bins of a group of columns."""
    return {"features": "feature_bins", "targets": "target_bins"}[group]


def read_question(data: bytes) -> Question:
    """Read a layout from canonical JSON.

    Raises:
        ManifestError: it has another form, or its numbers could overflow; the text has the path.
    """
    keys = frozenset({"splits", "labels", "targets", "features", "seed"})
    found = fields_of(read_object(data, num_bytes_max=BYTES_MAX, what="question"), "question", keys=keys)
    splits = [one_of(each, "splits", allowed=SPLITS) for each in items_of(found["splits"], "splits", num_max=2)]
    labels = tuple(
        (name, integer(classes, f"labels.{name}", low=1, high=LABELS_MAX))
        for name, classes in _pairs(found["labels"], "labels")
    )
    columns = {
        group: tuple(
            (name, tuple(map(_float, items_of(edges, f"{group}.{name}", num_max=EDGES_MAX))))
            for name, edges in _pairs(found[group], group)
        )
        for group in ("targets", "features")
    }
    seed = integer(found["seed"], "seed", low=0, high=2**64 - 1)
    question = Question(tuple(splits), labels, columns["targets"], columns["features"], seed)
    if faults := [*faults_of(question)]:
        raise ManifestError(faults[0])
    check_canonical(question.text.encode(), data)
    return question


def _pairs(value: object, path: str) -> Iterator[tuple[str, Any]]:
    for pair in items_of(value, path, num_max=FEATURES_MAX):
        if type(pair) is not list or len(pair) != 2:
            refuse(path, pair, "pairs of a name and its numbers")
        yield text(pair[0], path, num_max=NAME_LETTERS_MAX), pair[1]


def _float(value: object) -> float:
    if type(value) is not float or not math.isfinite(value):
        refuse("edges", value, "finite floats")
    return value


def faults_of(question: Question) -> Iterator[str]:
    """Yield why sites cannot add the numbers of a layout: each value, what is allowed, and why."""
    if not question.splits or len({*question.splits}) < len(question.splits):
        yield f"splits: got {list(question.splits)}: allowed is train, test, or both"
    for group, named in (("labels", question.labels), ("targets", question.targets), ("features", question.features)):
        names = [name for name, _ in named]
        if len({*names}) < len(names):
            yield f"{group}: got a name twice: allowed is each once"
    for (group, name), edges in question.edges.items():
        path, largest = f"{group}.{name}", 2.0**EXPONENT_MAX
        if not 2 <= len(edges) <= EDGES_MAX or any(low >= high for low, high in pairwise(edges)):
            yield f"{path}: got {_few(edges)}: allowed are 2 to {EDGES_MAX} edges, each above the one before"
        elif beyond := [edge for edge in edges if abs(edge) > largest]:
            yield (
                f"{path}: got an edge {beyond[0]:g}, and the sum of squares could overflow: allowed are edges within "
                f"{largest:g}, so give the feature in another unit"
            )
    if (number := question.num_numbers) > NUMBERS_MAX:
        numbers = count_of(number, "number")
        yield f"features: {numbers} of all labels, bins and moments: allowed are at most {NUMBERS_MAX}"


def _few(edges: Edges) -> str:
    return str(list(edges[:4])) if len(edges) <= 4 else f"{list(edges[:3])} and {len(edges) - 3} more"


# ---------------------------------------------------------------- a site's parts


def asked_parts(statistics: SiteStatistics, question: Question) -> SiteStatistics:
    """Return the parts of a site's statistics that a layout asks for, with its cells; nothing is left out by size yet.

    Raises:
        OtherLayout: a split with rows has no such label or column, or too many rows.
    """
    parts: dict[Place, Part] = {}
    withheld = dict(statistics.withheld)
    for place, cells in question.places():
        split, group, name = place
        num_rows = _rows(statistics, split)
        if num_rows > 1 << ROWS_BITS:
            raise OtherLayout(f"the {split} data has more than 2^{ROWS_BITS} rows, of which the sums could overflow")
        part = statistics.parts.get(place)
        if part is None:
            is_known = place in withheld or (split, group, "") in withheld or group.endswith("_bins")
            if num_rows and not is_known:
                raise OtherLayout(f"this site's {split} data has no {group.removesuffix('s')} {name!r}")
            continue
        if group == "labels" and isinstance(part, Histogram):
            part = _within(part, cells)
        parts[place] = part
    return SiteStatistics(parts, withheld)


def _rows(statistics: SiteStatistics, split: str) -> int:
    number = statistics.parts.get((split, "examples", ""))
    return int(number.values[0] or 0) if isinstance(number, Numbers) else 0


def _within(part: Histogram, cells: Sequence[str]) -> Histogram:
    """Return the counts of the cells of a layout; all other labels are one cell."""
    others = sum(number for label, number in part.cells.items() if label not in cells)
    return Histogram({label: part.cells.get(label, 0) for label in cells[:-1]} | {OTHER: others}, part.num_withheld)


def numbers_of(parts: Mapping[Place, Part], question: Question) -> list[int]:
    """Return a site's numbers in order.

    Args:
        parts: of `asked_parts`, without those that the site's policy leaves out.
        question: the layout.

    Raises:
        OtherLayout: a number is too large for its words, or a part is of another kind.
    """
    found: list[int] = []
    for place, cells in question.places():
        part = parts.get(place)
        if place[1].endswith("_bins") and (place[0], _columns_of(place[1]), place[2]) not in parts:
            part = None  # of a column whose moments are left out, the bins would tell its count
        match part:
            case None:
                size = 2 if place[1] == "examples" else len(cells) + 2 if cells else 6
                found += [0] * size
            case Numbers(merge="count", shape=()):
                found += [1, int(part.values[0] or 0)]
            case Histogram() if cells:
                found += [1, part.num_withheld, *(part.cells.get(cell, 0) for cell in cells)]
            case Moments():
                of_total, of_squares = _steps(question.edges[place[1], place[2]])
                sums = round(part.total * of_total), round(part.squares * of_squares)
                found += [1, part.count, part.missing, part.infinite, *sums]
            case _:
                raise OtherLayout(f"{'.'.join(place)} is of another kind")
    if max(map(abs, found), default=0) > 1 << NUMBER_BITS:
        raise OtherLayout(f"a sum is beyond 2^{NUMBER_BITS} steps, and would overflow")
    return found


def _columns_of(bins: str) -> str:
    return {"feature_bins": "features", "target_bins": "targets"}[bins]


def _steps(edges: Edges) -> tuple[int, int]:
    """Return the numbers of steps of 1 in a column's total and in its sum of squares, powers of two."""
    mantissa, exponent = math.frexp(max(abs(edges[0]), abs(edges[-1])))
    exponent -= mantissa == 0.5  # a power of two is within itself
    room = NUMBER_BITS - ROWS_BITS
    return 1 << room - exponent, 1 << room - 2 * exponent


# ---------------------------------------------------------------- the sum


def summed_parts(numbers: Sequence[int], question: Question, members: int) -> dict[Place, tuple[Part, int]]:
    """Return the parts of a sum, each with the number of sites that give it; none of those that no site gives.

    Args:
        numbers: added over the members, in order.
        question: the layout.
        members: of the sum.

    Raises:
        ValueError: they are no sum of this number of members.
    """
    found: dict[Place, tuple[Part, int]] = {}
    at = iter(numbers)
    for place, cells in question.places():
        present, part = next(at), _summed(at, place, cells, question)
        if not 0 <= present <= members:
            raise ValueError(f"{'.'.join(place)} is given by {present} of {count_of(members, 'member')}")
        if present:
            found[place] = part, present
    return found


def _summed(at: Iterator[int], place: Place, cells: Sequence[str], question: Question) -> Part:
    if place[1] == "examples":
        return count(_count(next(at), place))
    if cells:
        withheld = _count(next(at), place)
        named = cells if place[1] == "labels" else _intervals(question.edges[_columns_of(place[1]), place[2]])
        return Histogram({cell: _count(next(at), place) for cell in named}, withheld)
    of_total, of_squares = _steps(question.edges[place[1], place[2]])
    finite, missing, outside = (_count(next(at), place) for _ in range(3))
    return Moments(
        finite, missing, outside, Fraction(next(at), of_total), Fraction(_count(next(at), place), of_squares)
    )


def _count(number: int, place: Place) -> int:
    if number < 0:
        raise ValueError(f"{'.'.join(place)} has a count below 0")
    return number


def _intervals(edges: Edges) -> list[str]:
    last = len(edges) - 2
    return [f"[{low:.12g}, {high:.12g}{']' if n == last else ')'}" for n, (low, high) in enumerate(pairwise(edges))]
