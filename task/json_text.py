"""JSON that every parser reads: NaN and the infinities, which JSON lacks, become null, and a field says why.

{"loss": NaN, "sums": [1, Infinity]}  ->  {"loss": null, "sums": [1, null],
                                           "not_finite": {"loss": "NaN", "sums.1": "Infinity"}}
"""

import json
import math
from typing import Any

NOT_FINITE = "not_finite"
"""The field of the outermost object that lists, by path, the original of each number that is null here."""


def to_json(value: Any, **options: Any) -> str:
    """Return a value of JSON's types as text; `options` are passed to `json.dumps`."""
    try:
        return json.dumps(value, allow_nan=False, **options)
    except ValueError:  # rarely: a pass over the value in Python takes longer than its encoding
        return json.dumps(without_nan(value), allow_nan=False, **options)


def without_nan(value: Any) -> Any:
    """Return the value with null in place of numbers that are not finite; the outermost object lists them.

    The field is merged with an existing one.
    """
    found: dict[str, str] = {}
    clean = _clean(value, "", found)
    if found and isinstance(clean, dict):
        clean[NOT_FINITE] = {**(clean.get(NOT_FINITE) or {}), **found}
    return clean


def _clean(value: Any, path: str, found: dict[str, str]) -> Any:
    if isinstance(value, float) and not math.isfinite(value):
        found[path] = "NaN" if math.isnan(value) else "Infinity" if value > 0 else "-Infinity"
        return None
    if isinstance(value, dict):
        return {key: _clean(item, f"{path}.{key}" if path else str(key), found) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [_clean(item, f"{path}.{place}" if path else str(place), found) for place, item in enumerate(value)]
    return value
