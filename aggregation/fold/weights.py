"""The weights of updates: exact integers, so that sums of weighted updates depend on no order.

A client's claim n_k is a whole number or a fraction: examples, tokens, a sum of class weights. Every float64 is an
integer times a power of two, so one power of two turns all weights of a round into integers, and no ratio changes.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass
from fractions import Fraction

from atoll.tensors.updates.weight import WEIGHT_MAX, WEIGHT_MIN, WEIGHT_RANGE

SIGNIFICANT_BITS = 53
"""Number of bits of an integer weight from its highest to its lowest 1, at most: float64's."""

NORMALIZER_MAX = 1e9
"""The largest normalizer of FedNova, and number of effective steps, that an update may claim."""


@dataclass(frozen=True, slots=True)
class Share:
    """The share of one update in the mean: n_k = `num_examples` > 0, s_k = `scale` in (0, 1] (staleness, work)."""

    num_examples: int | float
    scale: float = 1.0

    def __post_init__(self) -> None:
        if not WEIGHT_MIN <= self.num_examples <= WEIGHT_MAX:
            raise ValueError(f"num_examples {self.num_examples} is not in {WEIGHT_RANGE}")
        if not 0.0 < self.scale <= 1.0:
            raise ValueError(f"scale {self.scale} is not in (0, 1]")


def integer_weights(shares: Sequence[Share]) -> tuple[int, ...]:
    """Return the integer weights of one round's updates.

        w_k = 2^p x_k,  x_k = n_k s_k    p >= 0, the least with which all w_k are integers

    x_k is the float64 next to the product, which is exact without a discount (s_k = 1). So w_k = n_k where all n_k are
    whole numbers and none is discounted, and else the ratios are those of the x_k, exactly. p depends on the set of the
    shares alone, and no weight on their order. An integer has at most 53 bits between its highest and its lowest 1, so
    float64 holds it exactly, however large it is.

    Args:
        shares: K >= 1 shares.

    Returns:
        K integers >= 1, in the order of the shares.

    Raises:
        ValueError: no shares.

    Source:
        McMahan et al., "Communication-Efficient Learning of Deep Networks from Decentralized Data", AISTATS 2017,
        Algorithm 1 (n_k); the common power of two is ours.
    """
    if not shares:
        raise ValueError("no shares to weigh")
    ratios = [(share.num_examples * share.scale).as_integer_ratio() for share in shares]
    common = max(denominator for _, denominator in ratios)
    return tuple(numerator * (common // denominator) for numerator, denominator in ratios)


def weight_cap(weights: Sequence[float], max_share: float) -> float | None:
    """Return the largest weight c with which no site has more than a share s of the total; None: no bound is needed.

        w_k' = min(w_k, c),  w_k' <= s sum_j w_j'

    With the m largest weights at c and the sum R of the others, c = s R / (1 - m s) for the least m with which none of
    the others is above c. It is computed in rationals and rounded down to a float64, so it depends on no order, and no
    share is above s by rounding. K < 1 / s sites cannot all be within s: then c is the smallest weight, and all count
    alike.

    Args:
        weights: w_k > 0 of K sites.
        max_share: s in (0, 1], as the written decimal: 0.4 is 2/5.

    Source:
        Water-filling, as in Boyd and Vandenberghe, "Convex Optimization", 2004, example 5.2, with a bound by the total.
    """
    found, share = sorted(map(Fraction, weights), reverse=True), Fraction(repr(max_share))
    rest = sum(found, Fraction())
    for number, largest in enumerate(found):
        left = 1 - number * share
        if left <= 0:
            break
        cap = share * rest / left
        if largest <= cap:
            return None if not number else _rounded_down(cap)
        rest -= largest
    return float(found[-1]) if found and found[-1] < found[0] else None


def num_sites_for(max_share: float) -> int:
    """Return the least number of sites that can all be within this share, ceil(1 / s)."""
    return math.ceil(1 / max_share - 1e-9)


def _rounded_down(number: Fraction) -> float:
    nearest = float(number)
    return nearest if Fraction(nearest) <= number else math.nextafter(nearest, 0.0)


def is_integer_weight(weight: int) -> bool:
    """Return whether float64 holds a weight exactly, as it holds all of `integer_weights`."""
    return weight >= 1 and weight.bit_length() - (weight & -weight).bit_length() < SIGNIFICANT_BITS


@dataclass(frozen=True, slots=True)
class Normalized:
    """FedNova's weighting of the trained floats of a round: mean = scale * sum_k w_k f_k u_k / sum_k w_k."""

    factors: tuple[float, ...]
    """f_k in (0, 1], in the order of the updates."""
    scale: float


def normalized(weights: Sequence[int], normalizers: Sequence[float], effective_steps: Sequence[float]) -> Normalized:
    """Return FedNova's normalized averaging, on the grid of the exact mean.

        x <- x + tau_eff sum_k p_k u_k / a_k,   p_k = w_k / sum_j w_j,   tau_eff = sum_k p_k e_k
        f_k = min_j a_j / a_k,   scale = tau_eff / min_j a_j

    With equal a_k = e_k every factor and the scale are 1: FedAvg, to the bit. The scale is computed in rationals and
    rounded once, so it depends on no order.

    Args:
        weights: w_k >= 1 (`integer_weights`).
        normalizers: a_k = ||a_k||_1 in [1, NORMALIZER_MAX].
        effective_steps: e_k in the same range: a_k, and with a proximal term the number of steps.

    Raises:
        ValueError: a number is out of its range.

    Source:
        Wang et al., "Tackling the Objective Inconsistency Problem in Heterogeneous Federated Optimization", NeurIPS
        2020, equation 8, and the authors' code for e_k.
    """
    for number in (*normalizers, *effective_steps):
        if not 1.0 <= number <= NORMALIZER_MAX:
            raise ValueError(f"normalizer or effective steps {number} is not in [1, {NORMALIZER_MAX:g}]")
    least = min(normalizers)
    steps = sum(weight * Fraction(number) for weight, number in zip(weights, effective_steps, strict=True))
    scale = float(steps / (sum(weights) * Fraction(least)))
    return Normalized(tuple(least / number for number in normalizers), scale)


def staleness_discount(staleness: int, *, exponent: float) -> float:
    """Return the scale of an update that was computed `staleness` versions ago.

        s(t) = (1 + t)^-a

    Args:
        staleness: t >= 0, commits between the version that the update trained on and now.
        exponent: a >= 0; 0 counts a stale update in full, 1/2 is FedBuff's choice.

    Returns:
        In (0, 1]; 1 when t = 0.

    Raises:
        ValueError: `staleness` or `exponent` is negative.

    Source:
        Xie et al., "Asynchronous Federated Optimization", arXiv:1903.03934v5, section 5.2 (polynomial);
        Nguyen et al., "Federated Learning with Buffered Asynchronous Aggregation", arXiv:2106.06639v4 (a = 1/2).
    """
    if staleness < 0:
        raise ValueError(f"staleness {staleness} is not at least 0")
    if not exponent >= 0.0:
        raise ValueError(f"exponent {exponent} is not at least 0")
    return float((1.0 + staleness) ** -exponent)


def hinge_discount(staleness: int, *, slope: float, delay: int) -> float:
    """Return the scale of a stale update that counts in full up to a delay.

        s(t) = 1 when t <= b, else 1 / (1 + a (t - b))

    Args:
        staleness: t >= 0, as in `staleness_discount`.
        slope: a > 0.
        delay: b >= 0.

    Returns:
        In (0, 1].

    Raises:
        ValueError: `staleness` or `delay` is negative, or `slope` not positive.

    Source:
        Xie et al., arXiv:1903.03934v5, section 5.2 (hinge); the paper's (a, b) are of {4, 10} x {2, 4}.
    """
    if staleness < 0 or delay < 0:
        raise ValueError(f"staleness {staleness} and delay {delay} are not both at least 0")
    if not slope > 0.0:
        raise ValueError(f"slope {slope} is not positive")
    return 1.0 if staleness <= delay else 1.0 / (1.0 + slope * (staleness - delay))
