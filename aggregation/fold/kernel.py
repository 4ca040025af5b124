"""The innermost loop of the exact fold: compiled by numba if it is installed, numpy otherwise, with the same bits.

    total += rint(values scale);  were all |values| <= magnitude?

numpy makes six passes over a block, the compiled loop one. Every operation is an IEEE 754 double one in the same order
(no fused multiply-add, no reordering: numba does neither), so not one bit differs; a test holds them together.
"""

from collections.abc import Callable
from functools import cache
from typing import Any

import numpy as np
from numpy.typing import NDArray

from atoll.tensors.numba_support import COMPILED_FROM, has_compiler

AddWithin = Callable[[NDArray[np.float64], NDArray[np.float32], np.float64, float], bool]
"""(total, values, scale, magnitude) -> whether every value is within the magnitude; NaN never is."""


def add_within_by_numpy(
    total: NDArray[np.float64], values: NDArray[np.float32], scale: np.float64, magnitude: float
) -> bool:
    """Add rint(values scale) to the total with numpy; return whether every value is within the magnitude."""
    low, high = values.min().item(), values.max().item()  # doubles: the magnitude is not rounded to compare
    scaled = values.astype(np.float64)
    np.multiply(scaled, scale, out=scaled)
    np.rint(scaled, out=scaled)
    np.add(total, scaled, out=total)
    return bool(-magnitude <= low <= high <= magnitude)


def add_within_for(num_elements: int) -> AddWithin:
    """Return the loop for a fold of `num_elements` in all its updates."""
    return compiled() if num_elements >= COMPILED_FROM and has_compiler() else add_within_by_numpy


@cache
def compiled() -> AddWithin:
    """Return the loop in machine code; it is compiled at its first use on a machine, and read from a file later."""
    import numba

    @numba.njit(nogil=True, cache=True)
    def add_within(total: Any, values: Any, scale: Any, magnitude: Any) -> Any:
        is_within = True
        for i in range(values.size):
            value = np.float64(values[i])
            is_within &= abs(value) <= magnitude
            total[i] += np.rint(value * scale)
        return is_within

    loop: AddWithin = add_within
    return loop
