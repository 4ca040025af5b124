"""Values: dataclasses that nobody changes. mypy insists on that, so that the interpreter need not at each one.

What a frozen dataclass does at its birth, a call for each of its fields, is a twelfth of a simulated round: events and
effects are made by the million.
"""

from dataclasses import dataclass, field
from typing import TypeVar, dataclass_transform

T = TypeVar("T")


@dataclass_transform(frozen_default=True, field_specifiers=(field,))
def value(cls: type[T]) -> type[T]:
    """As `dataclass(frozen=True, slots=True)` has it, equal and hashed by its fields; frozen to mypy alone."""
    return dataclass(slots=True, unsafe_hash=True)(cls)
