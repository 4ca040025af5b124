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
from collections.abc import Iterable
from dataclasses import dataclass, field

import numpy as np
from numpy.typing import NDArray

from atoll.ground.printable import count_of
from atoll.tensors.noise.grid_noise import GridNoise
from atoll.tensors.secure.vector import rounded_clip

GRID_BITS = 30
SUM_MAX = 2.0**52
ROUNDING_MAX = 1 / 4
"""Largest share of correlated noise that rounding to the grid may add to it."""


def exponent_of(deviation: float) -> int:
    """Return e of the grid q = 2^e of sums whose noise has this standard deviation: floor(log2(z C)) - 30."""
    return math.frexp(deviation)[1] - 1 - GRID_BITS


def deviation_of(deviation: float, multiplier: float, values: int, rounding: tuple[int, float]) -> float:
    r"""Return the standard deviation of a sum's noise, with what rounding correlated noise to the grid costs.

    In steps of the grid round t releases r_t = S_t + N_t + R_t, where R_t is p_t = sum_{j>0} d_j N_{t-j}, rounded. R_t
    is computed from the noises alone, but it is no function of the releases: another sum S' with the same releases has
    other noises. So the rounding is not free as of a result would be. An upper bound of what it costs:

    Releases and S determine the noises, in the order of the rounds: N_t = r_t - S_t - R_t. Let S' be the sums without
    one client, N' the noises with which they have the same releases, and D, C = D^-1 the matrices of d and c. With
    R_t = p_t + E_t, where |E_t| <= 1/2 in each element, and D N = r - S - E:

        N' - N = C (S - S') + C (E - E')
        |N' - N| <= |C (S - S')| + |c|_1 |E - E'| <= s_k C / q + |c|_1 sqrt(d T)

    by the sensitivity s_k of k uses and Young's inequality: no element of E - E' is above 1. That holds for all
    releases, also if S follows earlier ones, and given those before, r_t is Gaussian about S_t + R_t or about a centre
    that is N'_t - N_t away. Such choices, one after the other, are one Gaussian mechanism with the bound of all their
    distances as its sensitivity (Smith and Thakurta 2022, arXiv 2210.17520). As s_k >= s_1, the noise

        z s_K (C + q |c|_1 sqrt(d T) / s_1) >= z (s_K / s_k) (s_k C + q |c|_1 sqrt(d T))

    has the multiplier z for K uses, and for fewer at least z s_K / s_k, as the rules account. The sums p_t of at most
    30 products are off by less than 2^-11 steps in float64, unless a noise is 64 standard deviations long: |E - E'|
    gets a factor 1 + 2^-10. All c are at least 0, as 1 / d = 1 / (1 - sum |d_j| x^j).

    Args:
        deviation: z s_K C, without the rounding.
        multiplier: z, of all rounds together.
        values: d, of an update.
        rounding: T, and |c|_1 s_K / s_1; (0, 0.0): the noises are independent.

    Raises:
        ValueError: rounding would make the noise longer by more than `ROUNDING_MAX` of it.
    """
    rounds, total = rounding
    steps = multiplier * total * math.sqrt(values * rounds) * (1.0 + 2.0**-10)
    if steps > ROUNDING_MAX * 2.0**GRID_BITS:
        of = f"correlated noise of {count_of(rounds, 'round')} for updates of {count_of(values, 'number')}"
        why = f"rounding would add more than {ROUNDING_MAX:.0%} to it"
        raise ValueError(f"{of} is too long for its grid: {why}: allowed is a smaller noise multiplier")
    exponent = exponent_of(deviation)
    found = deviation + math.ldexp(steps, exponent)
    if exponent_of(found) == exponent:
        return found
    return deviation + math.ldexp(steps, exponent + 1)  # below twice `deviation`, so no coarser grid follows


def rounded_parts(noises: Iterable[tuple[NDArray[np.int64], float]], size: int) -> NDArray[np.int64]:
    """Return the sum of noises of `size` elements, each times its factor, in whole steps: see `deviation_of`."""
    total = np.zeros(size)
    for noise, factor in noises:
        total += factor * noise
    return np.floor(total + 0.5).astype(np.int64)


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
        earlier = ((GridNoise(steps, key).between(tensor, num_elements, start, stop), d) for key, d in self.earlier)
        return found + rounded_parts(earlier, stop - start)


@dataclass(frozen=True, slots=True)
class PrivateSums:
    """What makes the opened sums of a round private, on the grid of their words.

    Attributes:
        divisor: the fixed number by which their sum is divided, whatever number of members is in it.
        noise: that is added to it; None: the members have added theirs.
    """

    divisor: int
    noise: GridNoise | None = None
