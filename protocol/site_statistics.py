"""The serialized statistics of a site's data: canonical JSON, read strictly.

{"parts": [["train", "labels", "", {"kind": "histogram", "cells": {"0": 41, "1": 59}, "withheld": 0}], ...],
 "withheld": [["test", "features", "age", "fewer than 10 values"], ...]}
"""

import json
import math
from fractions import Fraction
from typing import Any

from atoll.ground.strict_json import (
    INT64_MAX,
    ManifestError,
    fields_of,
    integer,
    items_of,
    one_of,
    read_object,
    refuse,
    text,
)
from atoll.training.statistics.exact import LETTERS_MAX, number_of
from atoll.training.statistics.parts import (
    GROUPS,
    LABELS_MAX,
    MERGES,
    NAME_LETTERS_MAX,
    NAMES_MAX,
    NUMBERS_MAX,
    SPLITS,
    Histogram,
    Moments,
    Numbers,
    Part,
    Place,
    SiteStatistics,
)

BYTES_MAX = 2 * 2**20
"""Largest size of a site's answer."""

WHY_LETTERS_MAX = 200
DIMENSIONS_MAX = 8

_KINDS = {"labels": "histogram", "features": "moments", "targets": "moments"}
_KEYS = {
    "numbers": frozenset({"kind", "merge", "shape", "values"}),
    "histogram": frozenset({"kind", "cells", "withheld"}),
    "moments": frozenset({"kind", "count", "missing", "infinite", "sum", "squares", "min", "max"}),
}


def encode(statistics: SiteStatistics) -> bytes:
    """Return the statistics of a site as canonical JSON."""
    return json.dumps(statistics.plain(), sort_keys=True, separators=(",", ":"), allow_nan=False).encode()


def decode(data: bytes) -> SiteStatistics:
    """Read the statistics of a site from canonical JSON.

    Raises:
        ManifestError: the bytes are not an answer, or too many; the text has the path, the value and the allowed
            values.
    """
    return from_plain(read_object(data, num_bytes_max=BYTES_MAX, what="statistics"))


def from_plain(document: object) -> SiteStatistics:
    """Read the statistics of a site from JSON types; errors as in `decode`."""
    fields = fields_of(document, "statistics", keys=frozenset({"parts", "withheld"}))
    num_max = len(SPLITS) * len(GROUPS) * NAMES_MAX
    parts: dict[Place, Part] = {}
    for number, item in enumerate(items_of(fields["parts"], "parts", num_max=num_max)):
        path = f"parts.{number}"
        place, value = _placed(item, path)
        if place in parts:
            refuse(path, place, "each place once")
        parts[place] = _part(value, path, place[1])
    withheld: dict[Place, str] = {}
    for number, item in enumerate(items_of(fields["withheld"], "withheld", num_max=num_max)):
        place, value = _placed(item, f"withheld.{number}")
        withheld[place] = text(value, f"withheld.{number}", num_max=WHY_LETTERS_MAX)
    return SiteStatistics(parts, withheld)


def _placed(item: object, path: str) -> tuple[Place, object]:
    values = items_of(item, path, num_max=4)
    if len(values) != 4:
        refuse(path, values, "[split, group, name, value]")
    split, group = one_of(values[0], path, allowed=SPLITS), one_of(values[1], path, allowed=GROUPS)
    name = values[2] if values[2] == "" else text(values[2], path, num_max=NAME_LETTERS_MAX + 10)
    return (split, group, name), values[3]


def _part(value: object, path: str, group: str) -> Part:
    kind = "histogram" if group.endswith("_bins") else _KINDS.get(group, "numbers")
    fields = fields_of(value, path, keys=_KEYS[kind])
    one_of(fields["kind"], f"{path}.kind", allowed=(kind,))
    if kind == "histogram":
        return _histogram(fields, path)
    part = _moments(fields, path) if kind == "moments" else _numbers(fields, path)
    if group == "examples" and (part.form != ("numbers", "count", ()) or None in fields["values"]):
        refuse(path, value, "one whole number >= 0 of examples")
    return part


def _histogram(fields: dict[str, Any], path: str) -> Histogram:
    cells = fields["cells"]
    if type(cells) is not dict or len(cells) > LABELS_MAX:
        refuse(f"{path}.cells", cells, f"an object of at most {LABELS_MAX} labels")
    counts = {
        text(label, f"{path}.cells", num_max=NAME_LETTERS_MAX): integer(n, f"{path}.cells", low=0, high=INT64_MAX)
        for label, n in cells.items()
    }
    return Histogram(counts, integer(fields["withheld"], f"{path}.withheld", low=0, high=LABELS_MAX))


def _moments(fields: dict[str, Any], path: str) -> Moments:
    counts = [
        integer(fields[name], f"{path}.{name}", low=0, high=INT64_MAX) for name in ("count", "missing", "infinite")
    ]
    total, squares = (_exact(fields[name], f"{path}.{name}") for name in ("sum", "squares"))
    if squares < 0 or counts[0] * squares < total**2:
        refuse(f"{path}.squares", fields["squares"], "count * squares >= sum^2")
    least, greatest = (_extreme(fields[name], f"{path}.{name}") for name in ("min", "max"))
    return Moments(counts[0], counts[1], counts[2], total, squares, least, greatest)


def _numbers(fields: dict[str, Any], path: str) -> Numbers:
    merge = one_of(fields["merge"], f"{path}.merge", allowed=MERGES)
    shape = tuple(
        integer(size, f"{path}.shape", low=0, high=NUMBERS_MAX)
        for size in items_of(fields["shape"], f"{path}.shape", num_max=DIMENSIONS_MAX)
    )
    items = items_of(fields["values"], f"{path}.values", num_max=NUMBERS_MAX)
    if len(items) != math.prod(shape):
        refuse(f"{path}.values", len(items), f"{math.prod(shape)} numbers")
    numbers = Numbers(merge, shape, tuple(None if i is None else _exact(i, f"{path}.values") for i in items))
    if merge == "count" and not _are_counts(numbers):
        refuse(f"{path}.values", items, "whole numbers >= 0, or null")
    if merge != "count" and None in items:
        refuse(f"{path}.values", items, "numbers")
    return numbers


def _are_counts(part: Numbers) -> bool:
    return all(value is None or (value >= 0 and value.denominator == 1) for value in part.values)


def _exact(value: object, path: str) -> Fraction:
    number = text(value, path, num_max=LETTERS_MAX)
    try:
        return number_of(number)
    except ValueError as error:
        raise ManifestError(f"{path}: got {number[:60]!r}; {error}") from None


def _extreme(value: object, path: str) -> float | None:
    if value is not None and (type(value) is not float or not math.isfinite(value)):
        refuse(path, value, "a finite float, or null")
    return value
