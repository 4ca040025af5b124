r"""The account of Gaussian steps of several kinds on the same data, with Poisson sampling and without it.

    kinds    (noise multiplier z, sampling rate q) -> number of steps
    bound    exact if no kind is sampled, by mu^2 = sum of steps / z^2 (`gaussian`); else by Rényi differential privacy,
             which adds up over steps of all kinds (`subsampled`)
    tight    the composed privacy loss distributions of all kinds (`loss_distribution`), never above the bound

The tight account takes up to a second for each kind: it is asked only where the bound does not decide, and only for
what it can bound (`loss_distribution.is_asked`). Both are upper bounds of epsilon, and the less one counts.
"""

import math
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from functools import lru_cache

from atoll.protocol.privacy import gaussian, loss_distribution, subsampled
from atoll.protocol.privacy.guarantee import EXACT, PLD, RDP

Kinds = Mapping[tuple[float, float], int]

KINDS_MAX = 8
"""Most kinds of a tight account; more have the bound."""

_ROUNDING = 1e-12
"""What is added to the divergence of a step, above the rounding of its logarithms."""


@dataclass(frozen=True, slots=True, order=True)
class Steps:
    """Steps of one kind.

    Attributes:
        noise_multiplier: z > 0, the standard deviation of the noise over the sensitivity of the sum.
        sample_rate: q in (0, 1], with which each record takes part, independently of others; 1: each does.
        steps: their number, at least 1.
    """

    noise_multiplier: float
    sample_rate: float
    steps: int


def kinds_of(parts: Iterable[Steps]) -> dict[tuple[float, float], int]:
    """Return the number of steps of each kind."""
    kinds: dict[tuple[float, float], int] = {}
    for part in parts:
        kind = part.noise_multiplier, part.sample_rate
        kinds[kind] = kinds.get(kind, 0) + part.steps
    return kinds


def epsilon_bound(kinds: Kinds, delta: float) -> float:
    """Return an upper bound of epsilon in microseconds, whatever is installed; exact if no kind is sampled."""
    if all(rate == 1.0 for _, rate in kinds):
        return gaussian.epsilon_of(gaussian.mu_of((z, steps) for (z, _), steps in kinds.items()), delta)
    rdps = [0.0] * len(subsampled.ORDERS)
    for (z, rate), steps in kinds.items():
        rdps = [total + steps * rdp for total, rdp in zip(rdps, _rdps_of(rate, z), strict=True)]
    found = (
        rdp + math.log1p(-1.0 / order) - (math.log(delta) + math.log(order)) / (order - 1)
        for order, rdp in zip(subsampled.ORDERS, rdps, strict=True)
    )
    return max(0.0, min(found))


def epsilon_of(kinds: Kinds, delta: float) -> tuple[float, str]:
    """Return epsilon by the tightest accountant that is installed, with the accountant in words."""
    bound = epsilon_bound(kinds, delta)
    if all(rate == 1.0 for _, rate in kinds):
        return bound, EXACT
    noise = min(z for z, _ in kinds)
    if len(kinds) > KINDS_MAX or not loss_distribution.is_asked(noise, sum(kinds.values()), bound):
        return bound, RDP
    tight = _tight(tuple(sorted(kinds.items())), delta, bound)
    return (tight, PLD) if tight < bound else (bound, RDP)


def is_within(kinds: Kinds, epsilon: float, delta: float) -> bool:
    """Return whether steps of these kinds together have (epsilon, delta)."""
    return epsilon_bound(kinds, delta) <= epsilon or epsilon_of(kinds, delta)[0] <= epsilon


def uses_within(kinds: Kinds, one: Iterable[Steps], epsilon: float, delta: float, most: int = 1_000_000) -> int:
    """Return how many further uses of the same steps keep all within (epsilon, delta), up to `most`.

    Args:
        kinds: of what was spent.
        one: steps of one use.
        epsilon: of all together.
        delta: of all together.
        most: end of the search.
    """
    use = kinds_of(one)

    def fits(uses: int) -> bool:
        return is_within(with_uses(kinds, use, uses), epsilon, delta)

    low, high = 0, 1
    while high <= most and fits(high):
        low, high = high, 2 * high
    high = min(high, most + 1)
    while high - low > 1:
        middle = (low + high) // 2
        low, high = (middle, high) if fits(middle) else (low, middle)
    return low


def with_uses(kinds: Kinds, use: Kinds, uses: int = 1) -> dict[tuple[float, float], int]:
    """Return the number of steps of each kind after further uses of the steps of `use`."""
    total = dict(kinds)
    for kind, steps in use.items():
        total[kind] = total.get(kind, 0) + uses * steps
    return total


@lru_cache(maxsize=1024)
def _tight(kinds: tuple[tuple[tuple[float, float], int], ...], delta: float, bound: float) -> float:
    return loss_distribution.epsilon_of_kinds([(rate, z, steps) for (z, rate), steps in kinds], delta, bound)


@lru_cache(maxsize=256)
def _rdps_of(rate: float, z: float) -> tuple[float, ...]:
    return tuple(max(0.0, subsampled.rdp_of(rate, z, order)) + _ROUNDING for order in subsampled.ORDERS)
