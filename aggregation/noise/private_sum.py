r"""The grid of a private sum, the bound of what one client adds to it, and its noise.

    q = 2^(floor(log2(z C)) - 30)                   from the settings alone: a grid from data would be a release
    r_k = rint(f_k u_k / q), f_k = min(1, C' / |u_k|)
    sum_k r_k + N_Z(0, (z C / q)^2)                 whole numbers, added exactly, then q / n

Rounding an update of d numbers makes it longer by at most q sqrt(d) / 2, so it is clipped to C' = C - q sqrt(d) / 2,
less a millionth of a millionth for the rounding of |u_k| and of the products: then |q r_k| <= C holds exactly.
The deviation z C / q lies in [2^30, 2^31), so with n clients |sum| <= n C / q + 10 z C / q stays below 2^52, in which
float64 is exact, for n <= z 2^20.
"""

import math
from dataclasses import dataclass, field

import numpy as np
from numpy.typing import NDArray

from atoll.aggregation.noise.discrete_gaussian import DiscreteGaussian
from atoll.ground.noise.key import key_of
from atoll.ground.printable import count_of

GRID_BITS = 30
BLOCK = 1 << 14
"""Elements of a tensor whose samples have one key."""
SLACK = 1e-12
SUM_MAX = 2.0**52
ROUNDING_MAX = 1 / 16
"""Largest share of the clip norm that rounding may take."""


def exponent_of(deviation: float) -> int:
    """Return e of the grid q = 2^e of sums whose noise has this standard deviation: floor(log2(z C)) - 30."""
    return math.frexp(deviation)[1] - 1 - GRID_BITS


def clip_to(clip_norm: float, exponent: int, num_elements: int) -> float:
    """Return C', to which an update of `num_elements` is clipped before it is rounded to the grid.

    Raises:
        ValueError: rounding would take more than `ROUNDING_MAX` of the clip norm: the noise is so large that its grid
            is too coarse for the updates.
    """
    rounding = math.ldexp(math.sqrt(num_elements) / 2.0, exponent)
    if rounding > ROUNDING_MAX * clip_norm:
        raise ValueError(
            f"updates of {count_of(num_elements, 'number')}, clipped to {clip_norm:g}, are too fine for the grid of "
            f"their noise, 2^{exponent}: allowed is a smaller noise multiplier"
        )
    return (clip_norm - rounding) * (1.0 - SLACK)


def fault_of_sum(cohort: int, noise_multiplier: float) -> str:
    """Return why a sum of a whole cohort would not be exact; empty: it is."""
    most = cohort * 2.0 ** (GRID_BITS + 1) / noise_multiplier + 10 * 2.0 ** (GRID_BITS + 1)
    if most < SUM_MAX:
        return ""
    of = f"a sum of {count_of(cohort, 'update')} with a noise multiplier of {noise_multiplier:g}"
    return f"{of} leaves the 52 bits of its grid"


@dataclass(frozen=True, slots=True)
class PrivateSum:
    """Noise of the sum of a round, and the number by which it is divided.

    Attributes:
        deviation: z C, in the units of an update.
        divisor: the fixed number of clients, whatever number took part.
        key: 32 bytes, of this round's set of updates.
    """

    deviation: float
    divisor: int
    key: bytes = field(repr=False)

    @property
    def exponent(self) -> int:
        """The exponent of the grid."""
        return exponent_of(self.deviation)

    def noise(self, tensor: str, num_elements: int, start: int, stop: int) -> NDArray[np.int64]:
        """Return the noise of elements start..stop of a tensor, in steps of the grid; the same however it is cut."""
        sampler = DiscreteGaussian(math.ldexp(self.deviation, -self.exponent))
        parts = [np.zeros(0, np.int64)]
        for block in range(start // BLOCK, -(-stop // BLOCK)):
            begin = block * BLOCK
            samples = sampler.sample(key_of(self.key, tensor, block), min(BLOCK, num_elements - begin))
            parts.append(samples[max(start - begin, 0) : stop - begin])
        return np.concatenate(parts)
