"""The decorator of value types: dataclasses that mypy checks to be frozen, at no run-time cost.

A frozen dataclass calls `object.__setattr__` for each field of each new instance. That takes a twelfth of a simulated
round, which makes millions of events and effects.
"""

from dataclasses import dataclass, field
from typing import TypeVar, dataclass_transform

T = TypeVar("T")


@dataclass_transform(frozen_default=True, field_specifiers=(field,))
def value(cls: type[T]) -> type[T]:
    """Make a class like `dataclass(frozen=True, slots=True)`, equal and hashed by its fields, frozen only for mypy."""
    return dataclass(slots=True, unsafe_hash=True)(cls)
