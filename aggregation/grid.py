"""The grid on which float updates are summed: one power of two per tensor, so that addition is associative.

Legend: K updates u_k with integer weights w_k, W = sum_k w_k, M = the largest |element| of any of them,
q = 2^e the quantum.
"""

import math
from fractions import Fraction
from typing import Any

import numpy as np
from numpy.typing import NDArray

SUM_BITS = 52
"""W M / q stays within 2^52: the sums are integers that float64 holds exactly."""

FLOAT32_MAX = float(np.finfo(np.float32).max)


def grid_exponent(magnitude: float, *, total_weight: int, count: int) -> int:
    """The exponent e of the finest grid on which no sum of these updates can lose a bit.

        q = 2^e,  e = ceil(log2(W M / 2^52));  0 when M = 0
        r_k = rint(w_k u_k / q),  sum_k w_k u_k ~ q sum_k r_k

    e depends on the set of updates alone (M, W, K), never on an order.

    Proof that every partial sum is exact. 2^52 q >= W M, so sum_k w_k |u_k| / q <= W M / q <= 2^52. float64 rounds
    each w_k u_k / q by at most 2^-53 of itself: together at most 1/2. rint moves each by at most 1/2. Hence
    sum_k |r_k| <= 2^52 + 1/2 + K/2, which is below 2^53 for K < 2^52. The r_k and all their partial sums, in any
    order, are integers of at most 53 bits: float64 adds them without rounding, int64 could hold them. No factor
    leaves float64's range: 2^-149 <= M < 2^128 and W < 2^105 give -201 <= e <= 181.

    Error of the mean. q < 2 W M / 2^52, so |sum_k (w_k u_k - q r_k)| / W <= (K + 1) q / 2W < (K + 1) M 2^-52: 2^-42 of
    the largest element for a thousand updates. The weights' size does not matter.

    Args:
        magnitude: M >= 0, at most the largest float32.
        total_weight: W >= K.
        count: K >= 1.

    Raises:
        ValueError: an argument is out of its range.
    """
    if not 0.0 <= magnitude <= FLOAT32_MAX:
        raise ValueError(f"magnitude {magnitude} is not in 0..{FLOAT32_MAX}")
    if not 1 <= count < 1 << SUM_BITS or not count <= total_weight < 1 << 105:
        raise ValueError(f"total weight {total_weight} of {count} updates is not in {count}..2^105 - 1")
    if magnitude == 0.0:
        return 0
    least = total_weight * Fraction(magnitude) / (1 << SUM_BITS)
    exponent = least.numerator.bit_length() - least.denominator.bit_length()
    return exponent if least <= Fraction(2) ** exponent else exponent + 1


def grid_scale(weight: int, exponent: int) -> np.float64:
    """w / q: what an element is multiplied with before it is rounded; exact for w <= 2^53."""
    return np.float64(math.ldexp(weight, -exponent))


def mean_from_grid(total: NDArray[np.float64], exponent: int, *, total_weight: int) -> NDArray[Any]:
    """Turn a block of the sum into the mean, in place: total q / W, with one rounding (q is a power of two)."""
    np.multiply(total, np.float64(math.ldexp(1.0, exponent)), out=total)
    np.divide(total, np.float64(total_weight), out=total)
    return total
