"""The conversion of values to JSON's own types."""

import dataclasses
from enum import Enum
from pathlib import Path
from typing import Any


def plain(value: Any) -> Any:
    """Return a value in JSON's own types; infinities and NaN, which JSON lacks, become their names."""
    if dataclasses.is_dataclass(value) and not isinstance(value, type):
        return {field.name: plain(getattr(value, field.name)) for field in dataclasses.fields(value)}
    if isinstance(value, dict):
        return {str(key): plain(item) for key, item in value.items()}
    if isinstance(value, list | tuple | set | frozenset):
        return [plain(item) for item in value]
    if isinstance(value, Enum):
        return value.value
    if isinstance(value, Path):
        return str(value)
    if isinstance(value, float) and value - value != 0:
        return repr(value)
    return value
