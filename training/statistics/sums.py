"""Exact sums of the columns of float64 arrays, and of their squares, without a loop over the rows.

A value is i * 2^(e - 53) with whole numbers |i| <= 2^53 and e. The i of one column and one e are added as whole
numbers: in float64, in halves of 27 bits, which is exact for up to 2^26 of them (`ROWS_MAX`). The few sums of each
column, one for every e, are then added as whole numbers of Python, of any size. Squares are split in the same way.
"""

from fractions import Fraction

import numpy as np
from numpy.typing import NDArray

Floats = NDArray[np.float64]
Ints = NDArray[np.int64]

ROWS_MAX = 2**26
LOW = 26
HALF = 27
LEAST_EXPONENT = -1073
"""The e of the least float64 above 0."""

SCALE = LEAST_EXPONENT - 53
"""Exponent of the unit of the sums; for the sums of squares it is doubled."""


class ColumnSums:
    """The exact sums of a number of columns, block by block."""

    def __init__(self, num_columns: int) -> None:
        self._totals, self._squares = [0] * num_columns, [0] * num_columns

    def add(self, values: Floats, columns: Ints) -> None:
        """Add finite values (n,), each to its column (n,)."""
        for start in range(0, len(values), ROWS_MAX):
            self._add(values[start : start + ROWS_MAX], columns[start : start + ROWS_MAX])

    def _add(self, values: Floats, columns: Ints) -> None:
        mantissas, exponents = np.frexp(values)
        whole = (mantissas * 2.0**53).astype(np.int64)
        least = int(exponents.min(initial=0))
        num_powers = int(exponents.max(initial=0)) - least + 1
        key, num = columns * num_powers + (exponents - least), len(self._totals) * num_powers
        filled = np.flatnonzero(np.bincount(key, minlength=num))
        size = np.abs(whole)
        high, low = size >> LOW, size & (2**LOW - 1)
        totals = _sums(key, whole, num, filled)
        products = [_sums(key, product, num, filled) for product in (high * high, high * low, low * low)]
        for place, total, hh, hl, ll in zip(filled.tolist(), totals, *products, strict=True):
            column, power = divmod(place, num_powers)
            shift = power + least - LEAST_EXPONENT
            self._totals[column] += total << shift
            self._squares[column] += ((hh << 2 * LOW) + (hl << LOW + 1) + ll) << 2 * shift

    def totals(self) -> list[Fraction]:
        """Return the sum of each column."""
        return [Fraction(total, 2**-SCALE) for total in self._totals]

    def squares(self) -> list[Fraction]:
        """Return the sum of the squares of each column."""
        return [Fraction(total, 2 ** (-2 * SCALE)) for total in self._squares]


def _sums(key: Ints, whole: Ints, num: int, wanted: Ints) -> list[int]:
    """Return the sums of whole numbers |i| <= 2^54 with each of the wanted keys, exactly."""
    high = np.bincount(key, weights=whole >> HALF, minlength=num)[wanted]
    low = np.bincount(key, weights=whole & (2**HALF - 1), minlength=num)[wanted]
    return [(int(h) << HALF) + int(part) for h, part in zip(high.tolist(), low.tolist(), strict=True)]
