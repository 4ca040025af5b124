r"""The exact account of Gaussian mechanisms without subsampling: epsilon, delta and noise of each other.

A mechanism adds N(0, (z S)^2) to each element of a sum of sensitivity S; z is its noise multiplier. Its privacy is the
one of N(mu, 1) beside N(0, 1) with mu = 1 / z, and mechanisms that are used one after the other, also by choices that
depend on earlier outputs, are one with mu^2 = sum_t 1 / z_t^2 (Dong, Roth, Su 2019, corollary 3.3). By Balle and Wang
2018 (arXiv 1805.06530), theorem 8, for every epsilon >= 0 and no smaller delta

    delta(epsilon) = Phi(mu / 2 - epsilon / mu) - e^epsilon Phi(-mu / 2 - epsilon / mu)

With x = epsilon / mu - mu / 2 and the Mills ratio R(x) = (1 - Phi(x)) / phi(x) this is phi(x) (R(x) - R(x + mu)), which
loses no digits where both terms are tiny; its logarithm is computed. The classic sqrt(2 ln(1.25 / delta)) / epsilon
(Dwork and Roth 2014, theorem A.1) holds for epsilon < 1 alone and is not used.
"""

import math
from collections.abc import Callable, Iterable

_TERMS = ((40.0, 12), (10.0, 30), (5.0, 60))
"""Numbers of terms of the continued fraction from these x on: it is exact to float64 there."""

_ROOT_2, _LOG_ROOT_2_PI = math.sqrt(2.0), math.log(2.0 * math.pi) / 2.0
_STEPS = 64
"""Halvings of an interval: below the spacing of float64 for each start used here."""


def mu_of(multipliers: Iterable[tuple[float, int]]) -> float:
    """Return mu of mechanisms that are used one after the other: sqrt(sum_t uses_t / z_t^2).

    Args:
        multipliers: noise multipliers z > 0, each with its number of uses.
    """
    return math.sqrt(math.fsum(uses / z**2 for z, uses in multipliers))


def log_delta_of(epsilon: float, mu: float) -> float:
    """Return the natural logarithm of the least delta at this epsilon; -inf: 0.

    Args:
        epsilon: at least 0.
        mu: at least 0, as of `mu_of`.
    """
    if mu == 0.0:
        return -math.inf
    x = epsilon / mu - mu / 2.0
    log_density = -x * x / 2.0 - _LOG_ROOT_2_PI
    if x >= 0.0:
        difference = _mills(x) - _mills(x + mu)
        return log_density + math.log(difference) if difference > 0.0 else -math.inf
    second = math.exp(log_density) * _mills(x + mu)  # = e^epsilon Phi(-x - mu)
    return math.log(_upper_tail(x) - second)


def epsilon_of(mu: float, delta: float) -> float:
    """Return the least epsilon at this delta, rounded up in its last digits.

    Args:
        mu: at least 0, as of `mu_of`.
        delta: in (0, 1).
    """
    wanted = math.log(delta)
    if log_delta_of(0.0, mu) <= wanted:
        return 0.0
    # The tail bound P[N(mu, 1) > x + mu] <= exp(-x^2 / 2) gives an epsilon that is enough.
    high = mu * mu / 2.0 + mu * math.sqrt(-2.0 * wanted)
    return _least(lambda epsilon: log_delta_of(epsilon, mu) <= wanted, 0.0, high)


def mu_within(epsilon: float, delta: float) -> float:
    """Return the largest mu with (epsilon, delta), rounded down in its last digits.

    Args:
        epsilon: at least 0.
        delta: in (0, 1).
    """
    wanted = math.log(delta)
    high = 1.0
    while log_delta_of(epsilon, high) <= wanted:
        high *= 2.0
    low = high
    while log_delta_of(epsilon, low) > wanted:
        low /= 2.0
    return -_least(lambda negated: log_delta_of(epsilon, -negated) <= wanted, -high, -low)


def noise_multiplier_of(epsilon: float, delta: float, uses: int = 1) -> float:
    """Return the least noise multiplier z whose `uses` together have (epsilon, delta): sqrt(uses) / mu.

    Args:
        epsilon: above 0.
        delta: in (0, 1).
        uses: at least 1.
    """
    return math.sqrt(uses) / mu_within(epsilon, delta) * (1.0 + 1e-12)  # above the rounding of `uses_within`


def uses_within(epsilon: float, delta: float, z: float, *, spent: float = 0.0) -> int:
    """Return the largest number of further uses of z that keeps everything within (epsilon, delta).

    Args:
        epsilon: above 0.
        delta: in (0, 1).
        z: noise multiplier, above 0.
        spent: mu of what was used before.
    """
    number = math.floor((mu_within(epsilon, delta) ** 2 - spent**2) * z**2 * (1.0 + 1e-9))
    while number > 0 and log_delta_of(epsilon, math.sqrt(spent**2 + number / z**2)) > math.log(delta):
        number -= 1
    return max(0, number)


def _mills(x: float) -> float:
    """Return (1 - Phi(x)) / phi(x) for x >= 0, by erfc or Laplace's continued fraction 1 / (x + 1 / (x + 2 / ..."""
    for least, terms in _TERMS:
        if x >= least:
            found = x
            for term in range(terms, 0, -1):
                found = x + term / found
            return 1.0 / found
    return _upper_tail(x) * math.exp(x * x / 2.0 + _LOG_ROOT_2_PI)


def _upper_tail(x: float) -> float:
    return math.erfc(x / _ROOT_2) / 2.0


def _least(holds: Callable[[float], bool], low: float, high: float) -> float:
    """Return the end of the interval at which a monotone condition holds, as close to its least place as float64 is."""
    for _ in range(_STEPS):
        middle = low + (high - low) / 2.0
        if not low < middle < high:
            break
        if holds(middle):
            high = middle
        else:
            low = middle
    return high
