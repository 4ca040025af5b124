"""The keys of purposes: fixed for ever by a vector, and all different."""

import hashlib
import hmac
from itertools import combinations

import pytest

from atoll.ground.noise.key import key_of

SECRET = bytes(range(32))


def test_a_key_is_the_hmac_of_its_purpose() -> None:
    said = b'atoll.v1 noise\n["train", "run-1", 7, "north"]'
    assert key_of(SECRET, "train", "run-1", 7, "north") == hmac.new(SECRET, said, hashlib.sha256).digest()


def test_other_purposes_and_other_secrets_have_other_keys() -> None:
    purposes = [("a", "bc"), ("ab", "c"), ("abc",), ("a", 1), ("a", "1"), ("a",), (), ("a", 1, "")]
    keys = [key_of(secret, *purpose) for purpose in purposes for secret in (SECRET, bytes(32))]
    assert not [pair for pair in combinations(keys, 2) if pair[0] == pair[1]]


@pytest.mark.parametrize("size", [0, 16, 31, 33])
def test_a_secret_of_another_size_is_refused(size: int) -> None:
    with pytest.raises(ValueError, match=f"a secret of noise has 32 bytes, got {size}"):
        key_of(bytes(size), "train")
