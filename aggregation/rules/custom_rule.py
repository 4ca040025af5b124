"""A custom rule behind the contract `Rule`: a failing or non-deterministic call is named."""

from dataclasses import replace
from typing import Any

import numpy as np
from numpy.typing import NDArray

from atoll.ground.printable import count_of
from atoll.plugins.guard import Guarded
from atoll.plugins.place import NOWHERE, Place

Array = NDArray[np.float64]

CHECKED_VALUES = 64
"""Largest number of elements of a piece that are reduced twice, to find a rule that is no function of them."""

CHECKED_TOLERANCE = 1e-5
"""Largest difference of the two results, relative to the element's largest value: rounding depends on the length."""


class RuleFailed(ValueError):
    """A custom rule that raised an unexpected error, or broke its contract: it costs the round, and not the process."""


class CustomRule(Guarded):
    """A custom rule, guarded. All methods raise RuleFailed, or the rule's ValueError.

    Args:
        custom: the object; its `reduce` and `mixing` may have a second parameter `place`, a `Place`.
    """

    failed = RuleFailed
    passing = (ValueError,)

    def __init__(self, custom: Any) -> None:
        super().__init__(f"rule {type(custom).__name__}", custom)
        self.takes_centre = bool(getattr(custom, "takes_centre", False))
        if hasattr(custom, "mixing"):  # only then it is a `GeometricRule`
            self.mixing = self._mixing

    def check(self, num_updates: int) -> None:
        """Raise ValueError if the rule guarantees nothing for so few updates."""
        if hasattr(self.custom, "check"):
            self.call("check", num_updates)

    def reduce(self, rows: NDArray[np.float32], place: Place = NOWHERE) -> Array:
        """Reduce (R, n) to (n), the first elements twice: in the piece, and alone.

        A rule that keeps state between its calls, that draws from a private generator, or whose values depend on other
        columns gives different results, and is refused.
        """
        number = min(CHECKED_VALUES, (rows.shape[1] + 1) // 2)  # never all of several columns
        again = rows[:, :number].copy()  # `reduce` may overwrite the rows
        largest = np.abs(again).max(axis=0, initial=0.0)
        values: Array = self.call("reduce", rows, place=place, into=_numbers)
        if values.shape != rows.shape[1:]:
            raise RuleFailed(
                f"{self.name} returns {values.shape} for {count_of(len(rows), 'row')} of tensor {place.tensor!r}, "
                f"expected is {rows.shape[1:]}"
            )
        alone = self.call("reduce", again, place=replace(place, stop=place.start + number), into=_numbers)
        if not _agree(values[:number], alone, largest):
            raise RuleFailed(
                f"{self.name} reduces the same {count_of(number, 'element')} of tensor {place.tensor!r} to other "
                "values when it is called again. A rule keeps no state between calls, and value i depends on column i "
                "alone; what it draws comes from the argument `place` of `reduce(rows, place)`, which also has round, "
                "version and tensor"
            )
        return values

    def _mixing(self, gram: Array, place: Place = NOWHERE) -> Array:
        """Return the combinations of the updates (R, K) for inner products (K, K); the rule is called twice."""
        mixing: Array = self.call("mixing", gram.copy(), place=place, into=_numbers)
        if mixing.ndim != 2 or mixing.shape[1] != len(gram) or len(mixing) < 1 or not np.isfinite(mixing).all():
            raise RuleFailed(
                f"{self.name} mixes {count_of(len(gram), 'update')} with a {mixing.shape} matrix, expected are finite "
                f"numbers (R, {len(gram)})"
            )
        again: Array = self.call("mixing", gram, place=place, into=_numbers)
        if again.shape != mixing.shape or not np.allclose(again, mixing, rtol=1e-9, atol=1e-12):
            raise RuleFailed(
                f"{self.name} mixes the same updates in another way when it is asked again: a rule keeps no state "
                "between calls, and draws from the argument `place` of `mixing(gram, place)`"
            )
        return mixing


def _numbers(result: Any) -> Array:
    return np.ascontiguousarray(result, np.float64)


def _agree(one: Array, other: Array, largest: NDArray[np.float32]) -> bool:
    if one.shape != other.shape:
        return False
    close = np.abs(one - other) <= CHECKED_TOLERANCE * np.maximum(largest, np.abs(one))
    return bool(np.all(close | (one == other) | (np.isnan(one) & np.isnan(other))))
