"""How much each update counts: exact integers, so that sums of weighted updates depend on no order."""

from collections.abc import Sequence
from dataclasses import dataclass
from fractions import Fraction

FIXED_POINT_ONE = 1 << 30
"""Weight of the heaviest update of a round in which some updates are scaled down."""


@dataclass(frozen=True, slots=True)
class Share:
    """What one update brings to the mean: n_k = `num_examples` >= 1, s_k = `scale` in (0, 1] (staleness, work)."""

    num_examples: int
    scale: float = 1.0

    def __post_init__(self) -> None:
        if self.num_examples < 1:
            raise ValueError(f"num_examples {self.num_examples} is not at least 1")
        if not 0.0 < self.scale <= 1.0:
            raise ValueError(f"scale {self.scale} is not in (0, 1]")


def integer_weights(shares: Sequence[Share]) -> tuple[int, ...]:
    """The integer weights of one round's updates.

        w_k = n_k                                              when every s_k = 1, else
        w_k = max(1, round_half_even(2^30 x_k / max_j x_j))    with x_k = n_k s_k

    Computed in rationals (a float is one), so no weight depends on the order of the shares. An accepted update always
    counts: the least weight is 1, although its share may be below 2^-31 of the largest.

    Args:
        shares: K >= 1 shares.

    Returns:
        K integers >= 1, in the order of the shares.

    Raises:
        ValueError: no shares.

    Source:
        McMahan et al., "Communication-Efficient Learning of Deep Networks from Decentralized Data", AISTATS 2017,
        Algorithm 1 (n_k); the fixed point is ours.
    """
    if not shares:
        raise ValueError("no shares to weigh")
    if all(share.scale == 1.0 for share in shares):
        return tuple(share.num_examples for share in shares)
    exact = [share.num_examples * Fraction(share.scale) for share in shares]
    largest = max(exact)
    return tuple(max(1, round(FIXED_POINT_ONE * x / largest)) for x in exact)


def staleness_discount(staleness: int, *, exponent: float) -> float:
    """The scale of an update that was computed `staleness` versions ago.

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
    """The scale of a stale update that counts in full for a while.

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
