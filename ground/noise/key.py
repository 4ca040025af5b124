r"""Key of one purpose, derived from a secret: without the secret it cannot be told from 32 random bytes.

    HMAC-SHA256(secret, "atoll.v1 noise\n" || JSON(purpose))

The purpose names the run, the round, the digest of the round's model, the site, and the use of the noise. So a job that
is repeated after a kill draws the same noise, which then cannot be averaged away, and any other job draws other noise.
Source: Krawczyk, Bellare, Canetti, RFC 2104; HMAC as a pseudorandom function.
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
        purpose: its parts; another number or order of parts, or a string for a number, is another purpose.

    Raises:
        ValueError: the secret has another size.
    """
    if len(secret) != BYTES:
        raise ValueError(f"a secret of noise has {BYTES} bytes, got {len(secret)}")
    return hmac.digest(secret, _DOMAIN + json.dumps(purpose).encode(), hashlib.sha256)
