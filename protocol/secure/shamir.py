"""Secret sharing (Shamir 1979, "How to share a secret") over the integers modulo a prime above 2^256.

A secret s of 32 bytes is the constant of a random polynomial of degree t - 1, and the share at x = 1..n its value:

    f(x) = s + a_1 x + ... + a_{t-1} x^{t-1} mod p,    s = sum_i f(x_i) prod_{j != i} x_j / (x_j - x_i) mod p

Any t shares determine s; fewer tell nothing of it, whatever the computing power.
"""

import secrets
from collections.abc import Sequence

PRIME = 2**256 + 297
SECRET_BYTES = 32
SHARE_BYTES = 33
"""Size of a share [bytes]: the field has a few elements that need 257 bits."""


class BadShare(ValueError):
    """Shares that are those of no secret."""


def split(secret: bytes, threshold: int, count: int) -> list[int]:
    """Return the shares at 1..count of a secret, `threshold` of which determine it.

    Args:
        secret: `SECRET_BYTES` bytes.
        threshold: t, 1 to `count`.
        count: n.
    """
    assert len(secret) == SECRET_BYTES
    assert 1 <= threshold <= count
    coefficients = [int.from_bytes(secret), *(secrets.randbelow(PRIME) for _ in range(threshold - 1))]
    return [_value(coefficients, x) for x in range(1, count + 1)]


def _value(coefficients: Sequence[int], x: int) -> int:
    result = 0
    for coefficient in reversed(coefficients):
        result = (result * x + coefficient) % PRIME
    return result


def weights(places: Sequence[int]) -> list[int]:
    """Return the factor of each share in the secret (Lagrange's basis at 0), for shares at distinct places x >= 1."""
    result = []
    for place in places:
        above, below = 1, 1
        for other in places:
            if other != place:
                above = above * other % PRIME
                below = below * (other - place) % PRIME
        result.append(above * pow(below, -1, PRIME) % PRIME)
    return result


def combined(factors: Sequence[int], shares: Sequence[int]) -> bytes:
    """Return the secret of shares.

    Args:
        factors: `weights` of the shares' places; one computation serves all secrets that are shared at these places.
        shares: one for each factor.

    Raises:
        BadShare: at least one share is wrong, as the result is no secret. Most wrong shares are not found so: compare
            the secret with what its owner has committed to.
    """
    found = sum(factor * share for factor, share in zip(factors, shares, strict=True)) % PRIME
    if found >= 1 << 8 * SECRET_BYTES:
        raise BadShare("the shares are those of no secret")
    return found.to_bytes(SECRET_BYTES)
