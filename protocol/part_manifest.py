"""The manifest of one part of an update: a client whose model is sharded over ranks sends one part for each of them.

    part      {"format","kind":"part","index","pieces":[...]}

The update's manifest, the root, lists the SHA-256 of each part's manifest: so the root's digest, which is the update's
identity, commits to every piece. Each part is sent on a separate stream. `parse_part` takes untrusted bytes, as
`manifest.parse_update` does.
"""

from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field
from itertools import chain

from atoll.ground.strict_json import ManifestError, check_canonical, constant, fields_of, integer, read_object
from atoll.protocol.manifest import (
    FORMAT,
    MANIFEST_BYTES_MAX,
    PARTS_MAX,
    Part,
    UpdateManifest,
    canonical,
    digest_of,
    encoded_pieces,
    first_of,
    read_pieces,
)
from atoll.protocol.vocabulary import Digest
from atoll.tensors.coverage import check_cover, check_inside
from atoll.tensors.layout import Layout, Piece

PART_BYTES_MAX = MANIFEST_BYTES_MAX - 192 * 1024
"""Largest manifest of a part [bytes]; it is sent in one message with the root, which takes 150 kB for 1,024 parts."""

_KEYS = frozenset({"format", "kind", "index", "pieces"})


@dataclass(frozen=True, slots=True)
class PartManifest:
    """Manifest of a part: its index among the parts, and its pieces in canonical order."""

    index: int
    pieces: tuple[Piece, ...]
    num_bytes: int = field(init=False, repr=False, compare=False)
    """Size of the pieces as sent [bytes]."""

    def __post_init__(self) -> None:
        object.__setattr__(self, "num_bytes", sum(piece.num_bytes for piece in self.pieces))

    @property
    def plain_bytes(self) -> int:
        """Size of the pieces without a codec [bytes]."""
        return sum(piece.plain_bytes for piece in self.pieces)

    @property
    def codecs(self) -> frozenset[str]:
        """Names of the codecs of its pieces; empty for a plain part."""
        return frozenset(piece.codec for piece in self.pieces if piece.codec)

    @property
    def digest(self) -> Digest:
        """Identity of the part."""
        return digest_of(self.encode())

    @property
    def listed(self) -> Part:
        """The part as the root lists it."""
        return Part(self.num_bytes, self.plain_bytes, self.digest)

    def encode(self) -> bytes:
        """Return the canonical bytes of the manifest."""
        return canonical({"format": FORMAT, "kind": "part", "index": self.index, "pieces": encoded_pieces(self.pieces)})


def parse_part(data: bytes) -> PartManifest:
    """Read a part's manifest.

    Raises:
        ManifestError: the bytes are not canonical.
    """
    fields = fields_of(read_object(data, num_bytes_max=PART_BYTES_MAX, what="part"), "part", keys=_KEYS)
    constant(fields["format"], "format", expected=FORMAT)
    constant(fields["kind"], "kind", expected="part")
    index = integer(fields["index"], "index", low=0, high=PARTS_MAX - 1)
    manifest = PartManifest(index, read_pieces(fields["pieces"]))
    check_canonical(manifest.encode(), data)
    return manifest


def part_of(root: UpdateManifest, data: bytes) -> PartManifest | None:
    """Read the part that an upload announces beside its root; None: the update has no parts and names none.

    Raises:
        ManifestError: the part is not canonical, or the root does not list it.
    """
    if not root.parts:
        if data:
            raise ManifestError("part: given; allowed: none, because the manifest lists no parts")
        return None
    if not data:
        raise ManifestError("part: none; allowed: one of the parts that the manifest lists, each on its own stream")
    part = parse_part(data)
    listed = root.parts[part.index] if part.index < len(root.parts) else None
    if listed != Part(part.num_bytes, part.plain_bytes, digest_of(data)):
        raise ManifestError(f"part: number {part.index}, with other sizes or another digest than the manifest lists")
    return part


def check_part(layout: Layout, part: PartManifest) -> list[str]:
    """Return the faults of a part by itself; see `manifest.check_against`."""
    return first_of(check_inside(layout, part.pieces))


def check_parts(layout: Layout, parts: Iterable[PartManifest], *, may_omit: bool = False) -> list[str]:
    """Return the faults of all parts together: each element of every tensor must be in exactly one of them.

    Args:
        layout: expected tensors, `VersionManifest.layout` of the base version.
        parts: all parts of the update, read one after the other: only one at a time is in memory.
        may_omit: whether whole tensors may be missing, though not all of them.
    """
    pieces: Iterator[Piece] = (piece for part in parts for piece in part.pieces)
    if may_omit:
        first = next(pieces, None)
        may_omit, pieces = first is not None, chain(() if first is None else (first,), pieces)
    return first_of(check_cover(layout, pieces, may_omit=may_omit))
