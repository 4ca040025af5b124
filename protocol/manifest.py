"""The manifests of versions and updates: the pieces that they consist of, as canonical bytes.

A manifest is one JSON object: keys sorted, no spaces, ASCII only, no NaN. Equal content has equal bytes, so the SHA-256
of the bytes is the identity of the version or the update, and it commits to every claim in it. `parse_version` and
`parse_update` take untrusted bytes: they return a manifest whose bytes are exactly the given ones, or raise
ManifestError.

    version   {"format","kind":"version","piece_bytes",
               "tensors":[{"dtype","model_dtype","name","sha256":[...],"shape"}, ...]}
    update    {"format","kind":"update","run_id","round_id","client_id","base_version","base_digest","num_examples",
               "work","pieces":[{"dtype","lengths","offsets","sha256","tensor"}, ...],
               "normalizer","effective_steps",    both for FedNova, each only if it is not 1
               "attempt"}                         of a masked update, at its secure sum; only if it is not 0

An update of several parts has "parts":[{"num_bytes","plain_bytes","sha256"}, ...] instead of "pieces": see
`part_manifest`.

`tensors/pieces` cuts a version's tensors into pieces, each with a SHA-256; an update's client chooses its
pieces itself.

An encoded piece of an update has two more keys, "codec" and "num_bytes"; its SHA-256 is taken over the encoded bytes.

Here the claims of an update (its round, examples, work) are only checked to be numbers. The state machine of the round
judges them, because it can say precisely what it refuses.
"""

import hashlib
import json
from collections.abc import Iterable
from dataclasses import asdict, dataclass, field, replace
from math import prod
from typing import Any

from atoll.aggregation.fold.weights import NORMALIZER_MAX
from atoll.ground.printable import count_of
from atoll.ground.strict_json import (
    INT64_MAX,
    ManifestError,
    check_canonical,
    constant,
    fields_of,
    finite,
    integer,
    items_of,
    number,
    one_of,
    read_object,
    refuse,
    sha256_hex,
    text,
    within,
)
from atoll.protocol.vocabulary import ClientId, Digest, RoundId, RunId, Version
from atoll.protocol.wire.channel import MESSAGE_BYTES_MAX
from atoll.tensors.codecs.chunks import encoded_bytes
from atoll.tensors.codecs.installed import NAME_MAX as CODEC_NAME_MAX
from atoll.tensors.codecs.installed import is_installed
from atoll.tensors.codecs.names import NAMES as CODEC_NAMES
from atoll.tensors.codecs.names import parse_codec
from atoll.tensors.coverage import check_cover, check_rows
from atoll.tensors.layout import FLOATS, ITEM_BYTES, Layout, Piece, Tensor, pieces_in_order
from atoll.tensors.pieces import PIECE_BYTES_MIN, cut, layout_of_pieces, num_cuts, piece_bytes_of

FORMAT = "atoll/1"

MANIFEST_BYTES_MAX = MESSAGE_BYTES_MAX - 256 * 1024
"""Largest manifest [bytes]; it is sent in one message, beside an update's statistics."""

PIECES_MAX = 65_536
PARTS_MAX = 1024
"""Largest number of parts of an update: the number of ranks over which a client may shard its model."""

DIMS_MAX = 8
BYTES_MAX = 2**50
"""Largest total size of all pieces, and of every size and offset [bytes]: far below the range of int64."""

NAME_MAX = 1024
ID_MAX = 256
RESERVED_NAMES = frozenset({"__metadata__"})
"""Keys of a safetensors header that do not name a tensor."""

UPDATE_DTYPES = frozenset(ITEM_BYTES)
VERSION_DTYPES = UPDATE_DTYPES - FLOATS | {"F32"}
"""Dtypes of a version: its floats are float32 masters, whatever dtype the model computes in."""

MODEL_DTYPES = {"F32": FLOATS | {"F64"}, "U8": frozenset({"U8", "BOOL"})}
"""Dtypes of the model by the dtype that stores them; every other dtype is stored unchanged."""


@dataclass(frozen=True, slots=True)
class VersionManifest:
    """Manifest of a version of the global model, or of one of its slots: tensors in canonical order, in pieces."""

    layout: Layout
    """Tensors as stored. Updates have these names, shapes and dtypes, except in a run whose model grows by rows."""
    pieces: tuple[Piece, ...]
    """Pieces that `cut_layout` makes, with their digests."""
    piece_bytes: int
    """Largest size of a piece [bytes]."""
    model_dtypes: tuple[str, ...] = ()
    """Dtypes in which the model computes, in the order of `layout`. Default: as stored."""
    num_bytes: int = field(init=False, repr=False, compare=False)
    """Size of the tensors [bytes]."""

    def __post_init__(self) -> None:
        object.__setattr__(self, "num_bytes", sum(tensor.num_bytes for tensor in self.layout))
        if not self.model_dtypes:
            object.__setattr__(self, "model_dtypes", tuple(tensor.dtype for tensor in self.layout))
        assert len(self.model_dtypes) == len(self.layout)

    @classmethod
    def of(
        cls, pieces: Iterable[Piece], *, model_dtypes: tuple[str, ...] = (), piece_bytes: int | None = None
    ) -> "VersionManifest":
        """Make the manifest from all pieces, in canonical order.

        Args:
            pieces: the pieces with their digests.
            model_dtypes: dtypes in which the model computes; default: as stored.
            piece_bytes: largest size of a piece [bytes]; a slot has its version's; default: computed from the
                layout.
        """
        pieces = tuple(pieces)
        layout = layout_of_pieces(pieces)
        return cls(layout, pieces, piece_bytes or piece_bytes_of(layout), model_dtypes)

    @property
    def digest(self) -> Digest:
        """Identity of the version."""
        return digest_of(self.encode())

    def encode(self) -> bytes:
        """Return the canonical bytes of the manifest."""
        digests: dict[str, list[str]] = {tensor.name: [] for tensor in self.layout}
        for piece in self.pieces:
            digests[piece.tensor].append(piece.sha256)
        tensors = [
            {
                "name": tensor.name,
                "dtype": tensor.dtype,
                "model_dtype": model_dtype,
                "shape": tensor.shape,
                "sha256": digests[tensor.name],
            }
            for tensor, model_dtype in zip(self.layout, self.model_dtypes, strict=True)
        ]
        return canonical({"format": FORMAT, "kind": "version", "piece_bytes": self.piece_bytes, "tensors": tensors})


@dataclass(frozen=True, slots=True)
class Part:
    """Part of an update, as the update's manifest lists it."""

    num_bytes: int
    """Size of its pieces as sent [bytes]."""
    plain_bytes: int
    """Size of its pieces without a codec [bytes]."""
    sha256: str
    """SHA-256 of the part's manifest (`part_manifest.PartManifest`)."""


@dataclass(frozen=True, slots=True)
class UpdateManifest:
    """Manifest of an update: its client, round, base version, number of examples, work, and pieces or parts."""

    run_id: RunId
    round_id: RoundId
    client_id: ClientId
    base_version: Version
    base_digest: Digest
    num_examples: int | float
    work: float
    pieces: tuple[Piece, ...]
    normalizer: float = 1.0
    """FedNova's ‖a‖₁, which divides the trained floats."""
    effective_steps: float = 1.0
    """This update's contribution to FedNova's τ_eff."""
    parts: tuple[Part, ...] = ()
    """The parts, in order; then `pieces` is empty. Default: the update is sent as a whole."""
    attempt: int = 0
    """The attempt at its secure sum whose masks it has; 0: it is not masked."""
    num_bytes: int = field(init=False, repr=False, compare=False)
    """Size of the pieces as sent [bytes]; cached, because every chunk of an upload needs it."""

    def __post_init__(self) -> None:
        assert not (self.pieces and self.parts)
        object.__setattr__(self, "num_bytes", sum(item.num_bytes for item in self.parts or self.pieces))

    @property
    def plain_bytes(self) -> int:
        """Size of the update without a codec [bytes]."""
        return sum(item.plain_bytes for item in self.parts or self.pieces)

    @property
    def codecs(self) -> frozenset[str]:
        """Names of the codecs of its pieces; empty for a plain update, and for one in parts, which list theirs."""
        return frozenset(piece.codec for piece in self.pieces if piece.codec)

    @property
    def digest(self) -> Digest:
        """Identity of the update."""
        return digest_of(self.encode())

    def encode(self) -> bytes:
        """Return the canonical bytes of the manifest."""
        return canonical(
            {
                "format": FORMAT,
                "kind": "update",
                "run_id": self.run_id,
                "round_id": self.round_id,
                "client_id": self.client_id,
                "base_version": self.base_version,
                "base_digest": self.base_digest,
                "num_examples": self.num_examples,
                "work": self.work,
                **({"parts": list(map(asdict, self.parts))} if self.parts else {"pieces": encoded_pieces(self.pieces)}),
            }
            | {name: value for name in _STEPS_KEYS if (value := getattr(self, name)) != 1.0}
            | ({"attempt": self.attempt} if self.attempt else {})
        )


def encoded_pieces(pieces: Iterable[Piece]) -> list[dict[str, Any]]:
    """Return the pieces of an update or of a part as the manifest represents them."""
    return [
        {
            **({"codec": piece.codec, "num_bytes": piece.encoded_bytes} if piece.codec else {}),
            "dtype": piece.dtype,
            "lengths": piece.lengths,
            "offsets": piece.offsets,
            "sha256": piece.sha256,
            "tensor": piece.tensor,
        }
        for piece in pieces
    ]


def digest_of(manifest: bytes) -> Digest:
    """Return the identity of a manifest: the SHA-256 of its canonical bytes."""
    return Digest(hashlib.sha256(manifest).hexdigest())


def parse_version(data: bytes) -> VersionManifest:
    """Read a version's manifest.

    Raises:
        ManifestError: the bytes are not canonical.
    """
    fields = fields_of(read_object(data, num_bytes_max=MANIFEST_BYTES_MAX), "manifest", keys=_VERSION_KEYS)
    constant(fields["format"], "format", expected=FORMAT)
    constant(fields["kind"], "kind", expected="version")
    piece_bytes = integer(fields["piece_bytes"], "piece_bytes", low=PIECE_BYTES_MIN, high=BYTES_MAX)
    pieces: list[Piece] = []
    layout: list[Tensor] = []
    model_dtypes: list[str] = []
    for index, item in enumerate(items_of(fields["tensors"], "tensors", num_max=PIECES_MAX)):
        tensor, model_dtype, of_tensor = _tensor(item, f"tensors[{index}]", piece_bytes, PIECES_MAX - len(pieces))
        layout.append(tensor)
        model_dtypes.append(model_dtype)
        pieces += of_tensor
    _check_together(tuple(pieces), "tensors")
    manifest = VersionManifest(tuple(layout), tuple(pieces), piece_bytes, tuple(model_dtypes))
    check_canonical(manifest.encode(), data)
    return manifest


def parse_update(data: bytes) -> UpdateManifest:
    """Read an update's manifest; check its claims only to be numbers.

    Raises:
        ManifestError: the bytes are not canonical.
    """
    document = read_object(data, num_bytes_max=MANIFEST_BYTES_MAX)
    given = _OPTIONAL_KEYS & document.keys()
    content = "parts" if "parts" in document else "pieces"
    fields = fields_of(document, "manifest", keys=_UPDATE_KEYS | given - {"pieces", "parts"} | {content})
    constant(fields["format"], "format", expected=FORMAT)
    constant(fields["kind"], "kind", expected="update")
    manifest = UpdateManifest(
        run_id=RunId(text(fields["run_id"], "run_id", num_max=ID_MAX)),
        round_id=RoundId(integer(fields["round_id"], "round_id", low=0, high=INT64_MAX)),
        client_id=ClientId(text(fields["client_id"], "client_id", num_max=ID_MAX)),
        base_version=Version(integer(fields["base_version"], "base_version", low=0, high=INT64_MAX)),
        base_digest=Digest(sha256_hex(fields["base_digest"], "base_digest")),
        num_examples=number(fields["num_examples"], "num_examples", low=-INT64_MAX - 1, high=INT64_MAX),
        work=finite(fields["work"], "work"),
        pieces=read_pieces(fields["pieces"]) if content == "pieces" else (),
        parts=_parts(fields["parts"]) if content == "parts" else (),
        attempt=integer(fields["attempt"], "attempt", low=1, high=INT64_MAX) if "attempt" in given else 0,
        **{name: within(fields[name], name, low=1.0, high=NORMALIZER_MAX) for name in given & _STEPS_KEYS},
    )
    check_canonical(manifest.encode(), data)
    return manifest


def read_pieces(value: object) -> tuple[Piece, ...]:
    """Read the pieces of an update or of a part; raises the errors of `parse_update`."""
    items = items_of(value, "pieces", num_max=PIECES_MAX)
    pieces = tuple(_piece(item, f"pieces[{index}]") for index, item in enumerate(items))
    _check_together(pieces, "pieces")
    return pieces


def _parts(value: object) -> tuple[Part, ...]:
    parts: list[Part] = []
    for index, item in enumerate(items_of(value, "parts", num_max=PARTS_MAX)):
        path = f"parts[{index}]"
        fields = fields_of(item, path, keys=_PART_KEYS)
        num_bytes, plain_bytes = (
            integer(fields[name], f"{path}.{name}", low=0, high=BYTES_MAX) for name in ("num_bytes", "plain_bytes")
        )
        parts.append(Part(num_bytes, plain_bytes, sha256_hex(fields["sha256"], f"{path}.sha256")))
    if not parts:
        refuse("parts", len(parts), f"1 to {PARTS_MAX}")
    if len({part.sha256 for part in parts}) < len(parts):  # each manifest contains its part's index
        raise ManifestError("parts: one manifest is listed twice; allowed: each once")
    if (total := sum(max(part.num_bytes, part.plain_bytes) for part in parts)) > BYTES_MAX:
        raise ManifestError(f"parts: {count_of(total, 'byte')} together; allowed: at most {BYTES_MAX}")
    return tuple(parts)


_VERSION_KEYS = frozenset({"format", "kind", "piece_bytes", "tensors"})
_TENSOR_KEYS = frozenset({"dtype", "model_dtype", "name", "sha256", "shape"})
_PIECE_KEYS = frozenset({"dtype", "lengths", "offsets", "sha256", "tensor"})
_STEPS_KEYS = frozenset({"normalizer", "effective_steps"})
_PART_KEYS = frozenset(Part.__dataclass_fields__)
_OPTIONAL_KEYS = _STEPS_KEYS | {"pieces", "parts", "attempt"}
_UPDATE_KEYS = frozenset(UpdateManifest.__dataclass_fields__) - _OPTIONAL_KEYS - {"num_bytes"} | {"format", "kind"}
_ENCODED_PIECE_KEYS = _PIECE_KEYS | {"codec", "num_bytes"}


def _tensor(value: object, path: str, piece_bytes: int, num_max: int) -> tuple[Tensor, str, list[Piece]]:
    """Read a tensor: return it, its dtype in the model, and its pieces, at most `num_max`."""
    fields = fields_of(value, path, keys=_TENSOR_KEYS)
    name = text(fields["name"], f"{path}.name", num_max=NAME_MAX, refused=RESERVED_NAMES)
    dtype = one_of(fields["dtype"], f"{path}.dtype", allowed=VERSION_DTYPES)
    model_dtype = one_of(
        fields["model_dtype"], f"{path}.model_dtype", allowed=MODEL_DTYPES.get(dtype, frozenset({dtype}))
    )
    tensor = Tensor(name, dtype, _sizes(fields["shape"], f"{path}.shape"))
    if _size(dtype, tensor.shape) > BYTES_MAX:
        refuse(path, tensor.shape, f"at most {BYTES_MAX} bytes")
    digests = items_of(fields["sha256"], f"{path}.sha256", num_max=num_max)
    if len(digests) != num_cuts(tensor, piece_bytes):
        refuse(f"{path}.sha256", len(digests), f"one for each piece of at most {count_of(piece_bytes, 'byte')}")
    checked = (sha256_hex(item, f"{path}.sha256[{index}]") for index, item in enumerate(digests))
    pieces = zip(cut(tensor, piece_bytes), checked, strict=True)
    return tensor, model_dtype, [replace(piece, sha256=sha256) for piece, sha256 in pieces]


def _piece(value: object, path: str) -> Piece:
    is_encoded = type(value) is dict and "codec" in value
    fields = fields_of(value, path, keys=_ENCODED_PIECE_KEYS if is_encoded else _PIECE_KEYS)
    name = text(fields["tensor"], f"{path}.tensor", num_max=NAME_MAX, refused=RESERVED_NAMES)
    dtype = one_of(fields["dtype"], f"{path}.dtype", allowed=UPDATE_DTYPES)
    offsets = _sizes(fields["offsets"], f"{path}.offsets")
    lengths = _sizes(fields["lengths"], f"{path}.lengths")
    if len(offsets) != len(lengths):
        refuse(f"{path}.offsets", fields["offsets"], f"as many as lengths ({len(lengths)})")
    piece = Piece(name, dtype, offsets, lengths, sha256_hex(fields["sha256"], f"{path}.sha256"))
    return _encoded(piece, fields, path) if is_encoded else piece


def _encoded(piece: Piece, fields: dict[str, Any], path: str) -> Piece:
    """Return the piece with its codec; values must be float32, the name canonical and the size exact.

    For a codec from an installed package, the manifest's size is taken as is, up to the size of plain values: the
    coordinator that judges the update has the codec, a reader of the manifest may not.
    """
    if piece.dtype != "F32":
        refuse(f"{path}.dtype", piece.dtype, "'F32' of an encoded piece")
    name = text(fields["codec"], f"{path}.codec", num_max=CODEC_NAME_MAX)
    if is_installed(name):
        size = integer(fields["num_bytes"], f"{path}.num_bytes", low=0, high=piece.plain_bytes)
        return replace(piece, codec=name, encoded_bytes=size)
    try:
        codec = parse_codec(name)
    except ValueError:
        refuse(f"{path}.codec", name, CODEC_NAMES)
    if codec.name != name:
        refuse(f"{path}.codec", name, repr(codec.name))
    size = encoded_bytes(codec, piece.num_elements)
    integer(fields["num_bytes"], f"{path}.num_bytes", low=size, high=size)
    return replace(piece, codec=name, encoded_bytes=size)


def _sizes(value: object, path: str) -> tuple[int, ...]:
    items = value if type(value) is list and len(value) <= DIMS_MAX else items_of(value, path, num_max=DIMS_MAX)
    for item in items:
        if type(item) is not int or not 0 <= item <= BYTES_MAX:
            break
    else:
        return tuple(items)
    return tuple(integer(item, f"{path}[{index}]", low=0, high=BYTES_MAX) for index, item in enumerate(items))


def _check_together(pieces: tuple[Piece, ...], path: str) -> None:
    """Check sizes, one dtype and number of dimensions per tensor, the canonical order, and that no piece repeats."""
    total = 0
    kinds: dict[str, tuple[str, int]] = {}
    boxes: set[tuple[str, tuple[int, ...]]] = set()
    for index, piece in enumerate(pieces):
        size = _size(piece.dtype, piece.lengths)
        if size > BYTES_MAX:
            refuse(f"{path}[{index}]", piece.lengths, f"at most {BYTES_MAX} bytes")
        total += max(piece.encoded_bytes, size) if 0 not in piece.lengths else piece.encoded_bytes
        kind = (piece.dtype, len(piece.lengths))
        if kinds.setdefault(piece.tensor, kind) != kind:
            refuse(f"{path}[{index}]", piece.tensor, "one dtype and one number of dimensions per tensor")
        box = (piece.tensor, piece.offsets)
        if box in boxes:
            refuse(f"{path}[{index}]", piece.tensor, "each piece once")
        boxes.add(box)
    if total > BYTES_MAX:
        raise ManifestError(f"{path}: {count_of(total, 'byte')} together; allowed: at most {BYTES_MAX}")
    if pieces_in_order(pieces) != pieces:
        raise ManifestError(f"{path}: not in canonical order: larger elements first, then by name, then by offsets")


def _size(dtype: str, lengths: tuple[int, ...]) -> int:
    """Return the bytes of a box; zeros do not hide a product of other sides that no array library accepts."""
    return ITEM_BYTES[dtype] * prod(lengths if 0 not in lengths else (max(length, 1) for length in lengths))


FAULTS_MAX = 20


def check_against(
    layout: Layout, manifest: VersionManifest | UpdateManifest, *, may_omit: bool = False, grows: bool = False
) -> list[str]:
    """Return the faults of a manifest against the expected names, shapes and dtypes, or none.

    Args:
        layout: expected tensors, `VersionManifest.layout` of the base version.
        manifest: its pieces must cover every tensor exactly once.
        may_omit: whether whole tensors may be missing.
        grows: whether the pieces are rows to append to each tensor, of any number.

    Returns:
        At most `FAULTS_MAX` faults, and the number of further ones.
    """
    pieces = manifest.pieces
    return first_of(check_rows(layout, pieces) if grows else check_cover(layout, pieces, may_omit=may_omit))


def first_of(faults: list[str]) -> list[str]:
    """Return at most `FAULTS_MAX` faults, and the number of further ones."""
    return faults[:FAULTS_MAX] + [f"and {len(faults) - FAULTS_MAX} more"] * (len(faults) > FAULTS_MAX)


def canonical(document: dict[str, Any]) -> bytes:
    """Return the canonical bytes of a JSON object."""
    return json.dumps(document, sort_keys=True, separators=(",", ":"), allow_nan=False).encode("ascii")
