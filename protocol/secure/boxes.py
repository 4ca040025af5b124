"""The sealed boxes in which a member sends each other member its two shares, through the coordinator.

    AES-256-GCM(box(i,j), nonce 0, share of b_i (33 bytes) || share of c_i (33 bytes), associated data sid || i || j)

A key seals one box only, so its nonce is constant (NIST SP 800-38D, 8.2: a key for each message).
"""

from typing import NamedTuple

from cryptography.exceptions import InvalidTag
from cryptography.hazmat.primitives.ciphers.aead import AESGCM

from atoll.ground.printable import count_of
from atoll.protocol.secure.shamir import PRIME, SHARE_BYTES
from atoll.protocol.secure.transcript import framed, number

_NONCE = bytes(12)


class Shares(NamedTuple):
    """The shares that one member gives another: of its self-mask's seed, and of its mask key."""

    seed: int
    key: int

    def __repr__(self) -> str:
        """Return nothing of the shares: they are in no log and no traceback."""
        return "Shares()"


class BadBox(ValueError):
    """A box that was not sealed by this member for this one in this session."""


def seal(key: bytes, shares: Shares, session: bytes, sender: int, receiver: int) -> bytes:
    """Return the one box of a sender for a receiver, `BOX_BYTES` long; members by their positions in the roster."""
    content = shares.seed.to_bytes(SHARE_BYTES) + shares.key.to_bytes(SHARE_BYTES)
    return AESGCM(key).encrypt(_NONCE, content, _associated(session, sender, receiver))


def unseal(key: bytes, box: bytes, session: bytes, sender: int, receiver: int) -> Shares:
    """Return the shares in a box.

    Raises:
        BadBox: it is another sender's, receiver's or session's, was changed, or contains no shares.
    """
    try:
        content = AESGCM(key).decrypt(_NONCE, box, _associated(session, sender, receiver))
    except (InvalidTag, ValueError):
        raise BadBox("it was sealed with another key, or changed") from None
    if len(content) != 2 * SHARE_BYTES:
        raise BadBox(f"it has {count_of(len(content), 'byte')}; allowed: {2 * SHARE_BYTES}")
    shares = Shares(int.from_bytes(content[:SHARE_BYTES]), int.from_bytes(content[SHARE_BYTES:]))
    if max(shares) >= PRIME:
        raise BadBox("it has a number that is no share")
    return shares


def _associated(session: bytes, sender: int, receiver: int) -> bytes:
    return framed("box", session, number(sender), number(receiver))
