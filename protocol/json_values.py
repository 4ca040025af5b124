"""The conversion of values to JSON's own types."""

import dataclasses
from collections.abc import Mapping
from enum import Enum
from pathlib import Path
from typing import Any

from atoll.task.json_text import without_nan


def plain(value: Any) -> Any:
    """Convert a value to JSON's types; infinities and NaN become null, with a field that says why (`json_text`)."""
    return without_nan(_plain(value))


def flat(table: Mapping[str, Any], prefix: str = "") -> dict[str, Any]:
    """Return the values of a table and its subtables by their dotted names; an empty subtable is a value."""
    found: dict[str, Any] = {}
    for name, value in table.items():
        is_table = isinstance(value, Mapping) and value
        found |= flat(value, f"{prefix}{name}.") if is_table else {f"{prefix}{name}": value}
    return found


def _plain(value: Any) -> Any:
    if dataclasses.is_dataclass(value) and not isinstance(value, type):
        return {field.name: _plain(getattr(value, field.name)) for field in dataclasses.fields(value)}
    if isinstance(value, dict):
        return {str(key): _plain(item) for key, item in value.items()}
    if isinstance(value, list | tuple | set | frozenset):
        return [_plain(item) for item in value]
    if isinstance(value, Enum):
        return value.value
    if isinstance(value, Path):
        return str(value)
    return value
