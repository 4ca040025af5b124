"""The messages of a session, between each member and the coordinator.

    member -> coordinator          coordinator -> member
    MemberKeys                     Roster        all members' keys, sorted by name, and the threshold
    SealedShares                   Boxes         what others have sealed for this member: the members that masked (U2)
    (the masked update)            Survivors     whose masked updates are in (U3)
     or MaskedWords, of an evaluation
    Agreement                      Opening       at least t agreements to these survivors
    Reveal
    Gone                           at any time: this member has left, with the reason

Members are named by their position in the roster. A reveal has room for one share of each member: of a survivor's seed,
or else of its mask key.
"""

import json
from collections.abc import Collection, Mapping

from atoll.ground.printable import count_of
from atoll.protocol.secure.shamir import SHARE_BYTES
from atoll.protocol.secure.transcript import framed
from atoll.protocol.value_type import value

Position = int

BOX_BYTES = 2 * SHARE_BYTES + 16
"""Size of a sealed box: two shares and the tag of AES-GCM [bytes]."""


@value
class SiteIdentity:
    """A site's public key and the proof that a client of this federation has made it.

    Attributes:
        key: raw Ed25519 public key.
        certificate: the client's certificate, PEM.
        certification: signature of the certificate's key.
    """

    key: bytes
    certificate: bytes
    certification: bytes


@value
class Chain:
    """The end of the hash chain of a site's promises: the number of its sessions, and the hash of its last promise."""

    count: int
    hash: bytes


@value
class MemberKeys:
    """The keys of a member for one session, signed with its site key.

    Attributes:
        name: of the client.
        terms: digest of the terms that it accepts.
        mask_key, box_key: raw X25519 public keys (RFC 7748), of this session only.
        commitment: to the seed of its self-mask.
        chain: of its promises.
        site: its long-lived key.
        signature: Ed25519 of the rest.
    """

    name: str
    terms: bytes
    mask_key: bytes
    box_key: bytes
    commitment: bytes
    chain: Chain
    site: SiteIdentity
    signature: bytes = b""

    def statement(self) -> bytes:
        """Return the bytes that the member signs."""
        fields = {
            "name": self.name,
            "terms": self.terms.hex(),
            "mask_key": self.mask_key.hex(),
            "box_key": self.box_key.hex(),
            "commitment": self.commitment.hex(),
            "chain": [self.chain.count, self.chain.hash.hex()],
            "site": [self.site.key.hex(), self.site.certificate.hex(), self.site.certification.hex()],
        }
        return framed("keys", json.dumps(fields, sort_keys=True, separators=(",", ":")).encode())


@value
class Roster:
    """The members of a session, sorted by name, and the threshold of its secrets."""

    threshold: int
    members: tuple[MemberKeys, ...]


@value
class SealedShares:
    """A member's boxes, by receiver: one for each other member."""

    boxes: Mapping[Position, bytes]


@value
class Boxes:
    """The boxes that are sealed for a member, by sender."""

    boxes: Mapping[Position, bytes]


@value
class MaskedWords:
    """What a member adds to the sum of an evaluation, masked: words of 64 bits, little-endian."""

    words: bytes


@value
class Survivors:
    """The members whose masked updates are in."""

    positions: frozenset[Position]


@value
class Agreement:
    """A member's signature of the survivors."""

    signature: bytes


@value
class Opening:
    """The agreements of members, by position."""

    signatures: Mapping[Position, bytes]


@value
class Reveal:
    """One share of each member that has masked, in the order of their positions."""

    shares: tuple[int, ...]


@value
class Gone:
    """The end of a session for this member.

    Attributes:
        reason: for people.
        refused: names of other members whose keys or boxes it refuses; without them it joins another attempt.
    """

    reason: str
    refused: tuple[str, ...] = ()


Question = Roster | Boxes | Survivors | Opening
Answer = SealedShares | Agreement | Reveal


def survivors_statement(session: bytes, positions: Collection[Position], members: int) -> bytes:
    """Return the bytes with which a member agrees to the survivors of a session of `members` members."""
    return framed("survivors", session, bitmap(positions, members))


def bitmap(positions: Collection[Position], members: int) -> bytes:
    """Return positions as bits, the first in the highest bit of the first byte."""
    bits = sum(1 << (8 * size_of(members) - 1 - position) for position in positions)
    return bits.to_bytes(size_of(members))


def positions_of(bits: bytes, members: int) -> frozenset[Position]:
    """Return the positions of a bitmap.

    Raises:
        ValueError: it has another size, or a bit beyond the members.
    """
    if len(bits) != size_of(members):
        raise ValueError(f"a bitmap of {count_of(len(bits), 'byte')}; allowed: {size_of(members)}")
    number, width = int.from_bytes(bits), 8 * len(bits)
    found = frozenset(position for position in range(width) if number >> (width - 1 - position) & 1)
    if found and max(found) >= members:
        raise ValueError(f"a bitmap with position {max(found)}; allowed: 0 to {members - 1}")
    return found


def size_of(members: int) -> int:
    """Return the size of a bitmap [bytes]."""
    return (members + 7) // 8


def is_sealed(boxes: Mapping[Position, bytes], receivers: Collection[Position]) -> bool:
    """Return whether there is exactly one box of the right size for each of these members."""
    return boxes.keys() == {*receivers} and all(len(box) == BOX_BYTES for box in boxes.values())
