"""The transcript of a session, and what is derived from it (the keys in `keys`).

Each digest and each key is bound to its purpose and, by the session's id, to the terms, the threshold and every
member's signed keys. So members that were shown different rosters derive different masks, and nothing opens.

    sid       = H("session", terms, t, member_1, signature_1, ..., member_n, signature_n)
    mask(i,j) = HKDF(X25519(c_i, c_j), "mask", sid, min(i,j), max(i,j))    the stream that i adds and j subtracts, i < j
    self(i)   = HKDF(b_i, "self", sid)                                     the stream that i adds
    box(i,j)  = HKDF(X25519(s_i, s_j), "box", sid, i, j)                   for what i sends to j

H is SHA-256 of the parts, each after its length; HKDF is RFC 5869 with SHA-256 and no salt; i is a position in the
roster.
"""

import hashlib
from collections.abc import Iterable

_DOMAIN = b"atoll.v1 secure "


def framed(purpose: str, *parts: bytes) -> bytes:
    """Return parts as one string of bytes that no other parts and no other purpose have."""
    return b"".join((_DOMAIN, purpose.encode(), b"\n", *(len(part).to_bytes(8) + part for part in parts)))


def digest(purpose: str, *parts: bytes) -> bytes:
    """Return the SHA-256 of framed parts, 32 bytes."""
    return hashlib.sha256(framed(purpose, *parts)).digest()


def session_id(terms: bytes, threshold: int, members: Iterable[tuple[bytes, bytes]]) -> bytes:
    """Return the id of a session.

    Args:
        terms: digest of its terms.
        threshold: t.
        members: the canonical bytes and the signature of each member's keys, in the order of the roster.
    """
    return digest("session", terms, number(threshold), *(part for member in members for part in member))


def number(value: int) -> bytes:
    """Return a non-negative integer below 2^64 as 8 bytes, big-endian."""
    return value.to_bytes(8)


def commitment(name: str, seed: bytes) -> bytes:
    """Return the commitment of a member to the seed of its self-mask; the seed is random, so it needs no blinding."""
    return digest("seed", name.encode(), seed)
