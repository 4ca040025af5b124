"""Secret sharing: any threshold of shares gives the secret, fewer fit every secret."""

import secrets

import pytest
from hypothesis import given
from hypothesis import strategies as st

from atoll.protocol.secure.shamir import PRIME, BadShare, combined, split, weights


def test_the_modulus_is_the_smallest_prime_above_2_to_the_256():
    """Fermat's test to a few bases; no number between is prime by the same test."""
    assert all(pow(base, PRIME - 1, PRIME) == 1 for base in (2, 3, 5, 7, 11, 13))
    assert all(pow(3, number - 1, number) != 1 for number in range(2**256 + 1, PRIME, 2))


@given(st.binary(min_size=32, max_size=32), st.integers(1, 12), st.integers(0, 12), st.randoms())
def test_any_threshold_of_shares_gives_the_secret(secret, threshold, more, draw):
    shares = split(secret, threshold, threshold + more)
    places = draw.sample(range(1, len(shares) + 1), threshold)
    assert combined(weights(places), [shares[place - 1] for place in places]) == secret


@given(st.integers(2, 8))
def test_fewer_shares_fit_every_secret(threshold):
    """For t - 1 shares and any secret there is a polynomial: with its next share the others give that secret."""
    shares = split(secrets.token_bytes(32), threshold, threshold)[:-1]
    wanted = int.from_bytes(secrets.token_bytes(32))
    factors = weights([*range(1, threshold + 1)])
    rest = sum(factor * share for factor, share in zip(factors[:-1], shares, strict=True))
    last = (wanted - rest) * pow(factors[-1], -1, PRIME) % PRIME
    assert combined(factors, [*shares, last]) == wanted.to_bytes(32)


def test_the_largest_secret_and_equal_bytes_are_shared():
    for secret in (bytes(32), b"\xff" * 32):
        shares = split(secret, 2, 3)
        assert combined(weights([1, 3]), [shares[0], shares[2]]) == secret


def test_shares_of_no_secret_are_found():
    with pytest.raises(BadShare):
        combined([1], [PRIME - 1])
