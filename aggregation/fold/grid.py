"""The grid on which float updates are summed: one power of two per tensor, so that addition is associative.

Legend: K updates u_k with integer weights w_k and factors f_k in [0, 1], W = sum_k w_k, M = the largest of all
f_k |u_k|, q = 2^e the quantum.
"""

import math
from fractions import Fraction
from typing import Any

import numpy as np
from numpy.typing import NDArray

from atoll.ground.printable import count_of

SUM_BITS = 52
"""Number of bits of the sums: W M / q stays within 2^52, so they are integers that float64 holds exactly."""

FLOAT32_MAX = float(np.finfo(np.float32).max)

WEIGHT_BITS = 400
"""Number of bits of the sum of weights: fractions and discounts of very different size need hundreds."""

EXPONENT_MIN = -300
"""Exponent of the finest grid, far below what float32 can tell from 0: where factors leave less, w / q would leave
float64."""


def grid_exponent(magnitude: float, *, total_weight: int, count: int) -> int:
    """Return the exponent e of the finest grid on which no sum of these updates can lose a bit.

        q = 2^e,  e = ceil(log2(W M / 2^52)), at least -300;  0 when M = 0
        r_k = rint(w_k f_k u_k / q),  sum_k w_k f_k u_k ~ q sum_k r_k

    e depends on the set of updates alone (M, W, K), never on an order.

    Proof that every partial sum is exact. 2^52 q >= W M, so sum_k w_k f_k |u_k| / q <= W M / q <= 2^52. float64 rounds
    M, w_k f_k / q and its product with u_k, each by at most 2^-53 of itself: together less than 2. rint moves each by
    at most 1/2. Hence sum_k |r_k| < 2^52 + 2 + K/2, which is below 2^53 for K < 2^52. The r_k and all their partial
    sums, in any order, are integers of at most 53 bits: float64 adds them without rounding, int64 could hold them.
    Nothing leaves float64's range: M < 2^128 and W < 2^400 give -300 <= e <= 476 and w_k / q < 2^700.

    Error of the mean. q < 2 W M / 2^52 (with e above its least), so |sum_k (w_k f_k u_k - q r_k)| / W < (K + 4) q / 2W
    < (K + 4) M 2^-52: 2^-41 of the largest element for a thousand updates. The weights' size does not matter.

    Args:
        magnitude: M >= 0, at most the largest float32, as float64 rounds it.
        total_weight: W >= K.
        count: K >= 1.

    Raises:
        ValueError: an argument is out of its range.
    """
    if not 0.0 <= magnitude <= FLOAT32_MAX:
        raise ValueError(f"magnitude {magnitude} is not in 0..{FLOAT32_MAX}")
    if not 1 <= count < 1 << SUM_BITS or not count <= total_weight < 1 << WEIGHT_BITS:
        raise ValueError(
            f"total weight {total_weight} of {count_of(count, 'update')} is not in {count}..2^{WEIGHT_BITS} - 1"
        )
    if magnitude == 0.0:
        return 0
    least = total_weight * Fraction(magnitude) / (1 << SUM_BITS)
    exponent = least.numerator.bit_length() - least.denominator.bit_length()
    return max(EXPONENT_MIN, exponent if least <= Fraction(2) ** exponent else exponent + 1)


def grid_scale(weight: int, exponent: int) -> np.float64:
    """Return w / 2^e, an update's scale before it is rounded to the grid; exact for `weights.is_integer_weight`."""
    return np.float64(math.ldexp(weight, -exponent))


def mean_from_grid(total: NDArray[np.float64], exponent: int, *, total_weight: int) -> NDArray[Any]:
    """Turn a block of the sum into the mean, in place: total q / W, with one rounding (q is a power of two)."""
    np.multiply(total, np.float64(math.ldexp(1.0, exponent)), out=total)
    np.divide(total, np.float64(total_weight), out=total)
    return total
