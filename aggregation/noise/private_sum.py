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

from atoll.ground.printable import count_of
from atoll.tensors.noise.grid_noise import GridNoise
from atoll.tensors.secure.vector import rounded_clip

GRID_BITS = 30
SUM_MAX = 2.0**52


def exponent_of(deviation: float) -> int:
    """Return e of the grid q = 2^e of sums whose noise has this standard deviation: floor(log2(z C)) - 30."""
    return math.frexp(deviation)[1] - 1 - GRID_BITS


def deviation_of(deviation: float, multiplier: float, values: int, rounding: tuple[int, float]) -> float:
    """Return the standard deviation of a sum's noise, with what rounding correlated noise to the grid costs.

    A round adds the noise of its own and, rounded to the grid, its parts of earlier ones. Against sums without this
    rounding each element of a round's sum moves by at most one step, and all rounds' by sum c sqrt(d rounds) steps, for
    the coefficients c of the inverse of the factors (`protocol/privacy/correlated`).

    Args:
        deviation: without the rounding.
        multiplier: z, of all rounds together.
        values: d, of an update.
        rounding: the rounds, and the sum of c; (0, 0.0): the noises are independent.
    """
    rounds, total = rounding
    step = math.ldexp(1.0, exponent_of(deviation) + 1)  # the grid of the result is at most twice as wide
    return deviation + multiplier * total * math.sqrt(values * rounds) * step


def clip_to(clip_norm: float, exponent: int, num_elements: int) -> float:
    """Return C', to which an update of `num_elements` is clipped before it is rounded to the grid.

    Raises:
        ValueError: rounding would take more than `ROUNDING_MAX` of the clip norm: the noise is so large that its grid
            is too coarse for the updates.
    """
    return rounded_clip(clip_norm, math.ldexp(1.0, exponent), num_elements)


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
        earlier: keys of noises of earlier rounds that are added to this round's, each with its factor.
    """

    deviation: float
    divisor: int
    key: bytes = field(repr=False)
    earlier: tuple[tuple[bytes, float], ...] = field(default=(), repr=False)

    @property
    def exponent(self) -> int:
        """The exponent of the grid."""
        return exponent_of(self.deviation)

    def noise(self, tensor: str, num_elements: int, start: int, stop: int) -> NDArray[np.int64]:
        """Return the noise of elements start..stop of a tensor, in steps of the grid; the same however it is cut."""
        steps = math.ldexp(self.deviation, -self.exponent)
        found = GridNoise(steps, self.key).between(tensor, num_elements, start, stop)
        if not self.earlier:
            return found
        rest = np.zeros(stop - start)
        for key, factor in self.earlier:
            rest += factor * GridNoise(steps, key).between(tensor, num_elements, start, stop)
        return found + np.floor(rest + 0.5).astype(np.int64)


@dataclass(frozen=True, slots=True)
class PrivateSums:
    """What makes the opened sums of a round private, on the grid of their words.

    Attributes:
        divisor: the fixed number by which their sum is divided, whatever number of members is in it.
        noise: that is added to it; None: the members have added theirs.
    """

    divisor: int
    noise: GridNoise | None = None
