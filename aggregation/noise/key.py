"""The key of one purpose of a secret: who does not have the secret cannot tell it from 32 random bytes.

    HMAC-SHA256(secret, "atoll.v1 noise\\n" || JSON(purpose))

The purpose says all that noise is for: the run, the round, the digest of the model that it begins with, the site, and
what is drawn. So a job that is repeated after a kill draws the same noise, which then cannot be averaged away, and any
other job draws other noise. Source: Krawczyk, Bellare, Canetti, RFC 2104; HMAC as a pseudorandom function.
"""

import hashlib
import hmac
import json

BYTES = 32
"""Size of a secret and of a key."""

_DOMAIN = b"atoll.v1 noise\n"


def key_of(secret: bytes, *purpose: str | int) -> bytes:
    """Return the key of a purpose, 32 bytes.

    Args:
        secret: 32 bytes, or the key of a wider purpose.
        purpose: what the noise is for; another number or order of parts, or a text for a number, is another purpose.

    Raises:
        ValueError: the secret has another size.
    """
    if len(secret) != BYTES:
        raise ValueError(f"a secret of noise has {BYTES} bytes, got {len(secret)}")
    return hmac.digest(secret, _DOMAIN + json.dumps(purpose).encode(), hashlib.sha256)
