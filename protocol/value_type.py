"""The decorator of value types: dataclasses that mypy checks to be frozen, at no cost at run time.

A frozen dataclass calls `object.__setattr__` for each field of each new instance, which is a twelfth of a simulated
round: events and effects are made by the million.
"""

from dataclasses import dataclass, field
from typing import TypeVar, dataclass_transform

T = TypeVar("T")


@dataclass_transform(frozen_default=True, field_specifiers=(field,))
def value(cls: type[T]) -> type[T]:
    """Make a class like `dataclass(frozen=True, slots=True)`, equal and hashed by its fields, frozen for mypy alone."""
    return dataclass(slots=True, unsafe_hash=True)(cls)
