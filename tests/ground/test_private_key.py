"""A private key in PEM, or one ValueError for everything else."""

import base64

import pytest
from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey
from cryptography.hazmat.primitives.serialization import (
    BestAvailableEncryption,
    Encoding,
    KeySerializationEncryption,
    NoEncryption,
    PrivateFormat,
)

from atoll.ground.private_key import private_key_in

KEY = Ed25519PrivateKey.from_private_bytes(bytes(range(32)))
ED25519, ED448, UNKNOWN = b"\x2b\x65\x70", b"\x2b\x65\x71", b"\x2b\x65\x7f"


def pem(lock: KeySerializationEncryption) -> bytes:
    return KEY.private_bytes(Encoding.PEM, PrivateFormat.PKCS8, lock)


def of_kind(kind: bytes) -> bytes:
    der = KEY.private_bytes(Encoding.DER, PrivateFormat.PKCS8, NoEncryption()).replace(ED25519, kind)
    return b"-----BEGIN PRIVATE KEY-----\n" + base64.b64encode(der) + b"\n-----END PRIVATE KEY-----\n"


def test_a_key_is_read() -> None:
    for content in (pem(NoEncryption()), of_kind(ED25519)):
        found = private_key_in(content)
        assert isinstance(found, Ed25519PrivateKey)
        assert found.private_bytes_raw() == bytes(range(32))


@pytest.mark.parametrize(
    "content",
    [b"", b"none", pem(BestAvailableEncryption(b"x")), of_kind(ED448), of_kind(UNKNOWN), pem(NoEncryption())[:-40]],
    ids=["empty", "text", "passphrase", "another curve with this length", "unknown kind", "cut"],
)
def test_anything_else_is_one_error(content: bytes) -> None:
    with pytest.raises(ValueError, match="no private key in PEM without a passphrase"):
        private_key_in(content)
