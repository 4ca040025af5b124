r"""The account of the Poisson-subsampled Gaussian mechanism: each record takes part in a step with probability q.

Built in is an upper bound of epsilon by Rényi differential privacy of integer orders a (Mironov, Talwar, Zhang 2019,
arXiv 1908.10530, section 3.3),

    rdp(a) = ln(sum_{k=0..a} C(a, k) (1 - q)^(a - k) q^k exp((k^2 - k) / (2 z^2))) / (a - 1)

which adds up over steps, and its conversion (Canonne, Kamath, Steinke 2020, arXiv 2004.00010, proposition 12)

    epsilon = min_a steps rdp(a) + ln(1 - 1 / a) - ln(delta a) / (a - 1)

Adjacent are data sets of which one has one record more. A shuffled or fixed batch has another bound: only a sampler
that includes each record independently has this guarantee (Chua et al. 2024).
"""

import math
from functools import lru_cache

ORDERS: tuple[int, ...] = (*range(2, 64), 80, 100, 128, 200, 256, 512, 1024)
NOISE_MAX = 1e6
"""Largest noise multiplier that a search returns."""
_PRECISION = 1e-6
"""Relative width of the interval at which the search for a noise multiplier ends."""


def rdp_of(q: float, z: float, order: int) -> float:
    """Return the Rényi divergence of one step.

    Args:
        q: sampling rate, in (0, 1].
        z: noise multiplier, above 0.
        order: whole, at least 2.
    """
    if q == 1.0:
        return order / (2.0 * z * z)
    log_q, log_rest = math.log(q), math.log1p(-q)
    terms = [
        _log_binomial(order, k) + (order - k) * log_rest + k * log_q + (k * k - k) / (2.0 * z * z)
        for k in range(order + 1)
    ]
    most = max(terms)
    total = math.fsum(math.exp(term - most) for term in terms)
    return (most + math.log(total)) / (order - 1)


def epsilon_bound(q: float, z: float, steps: int, delta: float) -> float:
    """Return an upper bound of epsilon at this delta after a number of steps; arguments as of `rdp_of`."""
    found = (
        steps * rdp + math.log1p(-1.0 / a) - (math.log(delta) + math.log(a)) / (a - 1)
        for a, rdp in zip(ORDERS, _rdps_of(q, z), strict=True)
    )
    return max(0.0, min(found))


@lru_cache(maxsize=64)
def _rdps_of(q: float, z: float) -> tuple[float, ...]:
    return tuple(rdp_of(q, z, order) for order in ORDERS)


def noise_multiplier_bound(epsilon: float, delta: float, q: float, steps: int) -> float:
    """Return a noise multiplier with which `epsilon_bound` is at most epsilon, within a millionth of the least one.

    Raises:
        ValueError: none up to `NOISE_MAX` has it.
    """
    high = 1.0
    while epsilon_bound(q, high, steps, delta) > epsilon:
        if (high := high * 2.0) > NOISE_MAX:
            raise ValueError(f"no noise multiplier up to {NOISE_MAX:g} has epsilon {epsilon:g} at delta {delta:g}")
    low = high
    while epsilon_bound(q, low, steps, delta) <= epsilon:
        low /= 2.0
    while high - low > _PRECISION * high:
        middle = (low + high) / 2.0
        if epsilon_bound(q, middle, steps, delta) <= epsilon:
            high = middle
        else:
            low = middle
    return high


def _log_binomial(n: int, k: int) -> float:
    return math.lgamma(n + 1) - math.lgamma(k + 1) - math.lgamma(n - k + 1)
