"""The keys of a session, each derived for one purpose and bound to its id (RFC 5869, SHA-256, no salt)."""

from cryptography.hazmat.primitives import hashes
from cryptography.hazmat.primitives.asymmetric.x25519 import X25519PrivateKey, X25519PublicKey
from cryptography.hazmat.primitives.kdf.hkdf import HKDF

from atoll.protocol.secure.transcript import framed, number

KEY_BYTES = 32


def exchanged(private: X25519PrivateKey, public: bytes) -> bytes | None:
    """Return the shared secret; None: the key has another size, or is a point of low order."""
    try:
        return private.exchange(X25519PublicKey.from_public_bytes(public))
    except ValueError:
        return None


def self_key(seed: bytes, session: bytes) -> bytes:
    """Return the key of a member's self-mask."""
    return _derived(seed, "self", session)


def mask_key(shared: bytes, session: bytes, one: int, other: int) -> bytes:
    """Return the key of the mask of two members.

    Args:
        shared: X25519 of their mask keys.
        session: id.
        one: position of one of them in the roster.
        other: position of the other one; the order does not matter.
    """
    return _derived(shared, "mask", session, number(min(one, other)), number(max(one, other)))


def box_key(shared: bytes, session: bytes, sender: int, receiver: int) -> bytes:
    """Return the key of the one box from a member to another; `shared`: X25519 of their box keys."""
    return _derived(shared, "box", session, number(sender), number(receiver))


def _derived(secret: bytes, purpose: str, *parts: bytes) -> bytes:
    return HKDF(hashes.SHA256(), KEY_BYTES, None, framed(purpose, *parts)).derive(secret)
