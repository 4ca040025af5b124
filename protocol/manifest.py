"""Manifests: what a version of the global model, or an update, consists of. Their bytes are canonical.

A manifest is one JSON object: keys sorted, no spaces, ASCII only, no NaN. Equal content has equal bytes, so the SHA-256
of the bytes is the identity of the version or the update, and it commits to every claim in it. `parse_version` and
`parse_update` take bytes from anyone: they return a manifest whose bytes are exactly the given ones, or they raise
ManifestError.

    version   {"format","kind":"version","piece_bytes",
               "tensors":[{"dtype","model_dtype","name","sha256":[...],"shape"}, ...]}
    update    {"format","kind":"update","run_id","round_id","client_id","base_version","base_digest","num_examples",
               "work","pieces":[{"dtype","lengths","offsets","sha256","tensor"}, ...],
               "normalizer","effective_steps"}    both of FedNova, each only when it is not 1

A version's tensors are cut into pieces by `aggregation.cuts`, and have one SHA-256 for each; an update's pieces are its
client's own.

A piece of an update that is encoded has two keys more, "codec" and "num_bytes"; its SHA-256 is of the encoded bytes.

What the numbers of an update claim (its round, its examples, its work) is judged by the round's machine, which can say
precisely what it refuses; here they only have to be numbers.
"""

import hashlib
import json
from bisect import bisect_left
from collections.abc import Iterable
from dataclasses import dataclass, field, replace
from typing import Any

from atoll.aggregation.codecs.chunks import encoded_bytes
from atoll.aggregation.codecs.names import NAMES as CODEC_NAMES
from atoll.aggregation.codecs.names import parse_codec
from atoll.aggregation.fold.weights import NORMALIZER_MAX
from atoll.aggregation.tensors.coverage import check_cover
from atoll.aggregation.tensors.layout import FLOATS, ITEM_BYTES, Layout, Piece, Tensor, pieces_in_order
from atoll.aggregation.tensors.pieces import PIECE_BYTES_MIN, cut, layout_of_pieces, num_cuts, piece_bytes_of
from atoll.protocol.strict_json import (
    INT64_MAX,
    ManifestError,
    constant,
    fields_of,
    finite,
    integer,
    items_of,
    one_of,
    read_object,
    refuse,
    sha256_hex,
    text,
    within,
)
from atoll.protocol.vocabulary import ClientId, Digest, RoundId, RunId, Version
from atoll.protocol.wire.channel import MESSAGE_BYTES_MAX

FORMAT = "atoll/1"

MANIFEST_BYTES_MAX = MESSAGE_BYTES_MAX - 256 * 1024
"""A manifest travels whole in one message, beside an update's statistics."""

PIECES_MAX = 65_536
DIMS_MAX = 8
BYTES_MAX = 2**50
"""Of all pieces together, as every size and offset: far from what int64 holds."""

NAME_MAX = 1024
ID_MAX = 256
CODEC_NAME_MAX = 32
RESERVED_NAMES = frozenset({"__metadata__"})
"""Keys of a safetensors header that are no tensor."""

UPDATE_DTYPES = frozenset(ITEM_BYTES)
VERSION_DTYPES = UPDATE_DTYPES - FLOATS | {"F32"}
"""A version's floats are float32 masters, whatever the model computes in."""

MODEL_DTYPES = {"F32": FLOATS | {"F64"}, "U8": frozenset({"U8", "BOOL"})}
"""The model's own dtypes, by the dtype that they are stored as; every other is stored as it is."""


@dataclass(frozen=True, slots=True)
class VersionManifest:
    """A version of the global model, or a slot of one: its tensors in canonical order, cut into pieces."""

    layout: Layout
    """The tensors as stored; every update has these names, shapes and dtypes."""
    pieces: tuple[Piece, ...]
    """Of `cuts.cut_layout`, with their digests."""
    piece_bytes: int
    """The largest size of a piece [bytes]."""
    model_dtypes: tuple[str, ...] = ()
    """In the order of `layout`: the dtype that the model itself computes in. Left out: as stored."""
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
        """From all pieces, in canonical order; of a slot, `piece_bytes` are those of its model."""
        pieces = tuple(pieces)
        layout = layout_of_pieces(pieces)
        return cls(layout, pieces, piece_bytes or piece_bytes_of(layout), model_dtypes)

    @property
    def digest(self) -> Digest:
        """The identity of the version."""
        return digest_of(self.encode())

    def encode(self) -> bytes:
        """The canonical bytes."""
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
        return _canonical({"format": FORMAT, "kind": "version", "piece_bytes": self.piece_bytes, "tensors": tensors})


@dataclass(frozen=True, slots=True)
class UpdateManifest:
    """An update: who made it, in which round, from which version, with how much data and work; its pieces."""

    run_id: RunId
    round_id: RoundId
    client_id: ClientId
    base_version: Version
    base_digest: Digest
    num_examples: int
    work: float
    pieces: tuple[Piece, ...]
    normalizer: float = 1.0
    """FedNova's ‖a‖₁: what the trained floats are divided by."""
    effective_steps: float = 1.0
    """What this update brings to FedNova's τ_eff."""
    num_bytes: int = field(init=False, repr=False, compare=False)
    """Size of the pieces as they are sent [bytes]; known once, for it is asked for with every chunk of an upload."""

    def __post_init__(self) -> None:
        object.__setattr__(self, "num_bytes", sum(piece.num_bytes for piece in self.pieces))

    @property
    def plain_bytes(self) -> int:
        """Size of the values [bytes]: what would be sent without a codec."""
        return sum(piece.plain_bytes for piece in self.pieces)

    @property
    def codecs(self) -> frozenset[str]:
        """What its pieces are encoded with; empty of a plain update."""
        return frozenset(piece.codec for piece in self.pieces if piece.codec)

    @property
    def digest(self) -> Digest:
        """The identity of the update."""
        return digest_of(self.encode())

    def encode(self) -> bytes:
        """The canonical bytes."""
        pieces = [
            {
                "tensor": piece.tensor,
                "dtype": piece.dtype,
                "offsets": piece.offsets,
                "lengths": piece.lengths,
                "sha256": piece.sha256,
                **({"codec": piece.codec, "num_bytes": piece.encoded_bytes} if piece.codec else {}),
            }
            for piece in self.pieces
        ]
        return _canonical(
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
                "pieces": pieces,
            }
            | {name: value for name in _STEPS_KEYS if (value := getattr(self, name)) != 1.0}
        )


def digest_of(manifest: bytes) -> Digest:
    """The identity of a manifest, from its canonical bytes."""
    return Digest(hashlib.sha256(manifest).hexdigest())


def parse_version(data: bytes) -> VersionManifest:
    """Read a version's manifest.

    Raises:
        ManifestError: not the canonical bytes of one.
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
    _check_canonical(manifest.encode(), data)
    return manifest


def parse_update(data: bytes) -> UpdateManifest:
    """Read an update's manifest; its claims are numbers, and not yet judged.

    Raises:
        ManifestError: not the canonical bytes of one.
    """
    document = read_object(data, num_bytes_max=MANIFEST_BYTES_MAX)
    given = _STEPS_KEYS & document.keys()
    fields = fields_of(document, "manifest", keys=_UPDATE_KEYS | given)
    constant(fields["format"], "format", expected=FORMAT)
    constant(fields["kind"], "kind", expected="update")
    manifest = UpdateManifest(
        run_id=RunId(text(fields["run_id"], "run_id", num_max=ID_MAX)),
        round_id=RoundId(integer(fields["round_id"], "round_id", low=0, high=INT64_MAX)),
        client_id=ClientId(text(fields["client_id"], "client_id", num_max=ID_MAX)),
        base_version=Version(integer(fields["base_version"], "base_version", low=0, high=INT64_MAX)),
        base_digest=Digest(sha256_hex(fields["base_digest"], "base_digest")),
        num_examples=integer(fields["num_examples"], "num_examples", low=-INT64_MAX - 1, high=INT64_MAX),
        work=finite(fields["work"], "work"),
        pieces=tuple(
            _piece(item, f"pieces[{index}]")
            for index, item in enumerate(items_of(fields["pieces"], "pieces", num_max=PIECES_MAX))
        ),
        **{name: within(fields[name], name, low=1.0, high=NORMALIZER_MAX) for name in given},
    )
    _check_together(manifest.pieces, "pieces")
    _check_canonical(manifest.encode(), data)
    return manifest


_VERSION_KEYS = frozenset({"format", "kind", "piece_bytes", "tensors"})
_TENSOR_KEYS = frozenset({"dtype", "model_dtype", "name", "sha256", "shape"})
_PIECE_KEYS = frozenset({"dtype", "lengths", "offsets", "sha256", "tensor"})
_STEPS_KEYS = frozenset({"normalizer", "effective_steps"})
_UPDATE_KEYS = frozenset(UpdateManifest.__dataclass_fields__) - _STEPS_KEYS - {"num_bytes"} | {"format", "kind"}
_ENCODED_PIECE_KEYS = _PIECE_KEYS | {"codec", "num_bytes"}


def _tensor(value: object, path: str, piece_bytes: int, num_max: int) -> tuple[Tensor, str, list[Piece]]:
    """A tensor, its dtype in the model, and its pieces, of which there may be so many more."""
    fields = fields_of(value, path, keys=_TENSOR_KEYS)
    name = text(fields["name"], f"{path}.name", num_max=NAME_MAX, refused=RESERVED_NAMES)
    dtype = one_of(fields["dtype"], f"{path}.dtype", allowed=VERSION_DTYPES)
    model_dtype = one_of(
        fields["model_dtype"], f"{path}.model_dtype", allowed=MODEL_DTYPES.get(dtype, frozenset({dtype}))
    )
    tensor = Tensor(name, dtype, _sizes(fields["shape"], f"{path}.shape"))
    _check_size(dtype, tensor.shape, path)
    digests = items_of(fields["sha256"], f"{path}.sha256", num_max=num_max)
    if len(digests) != num_cuts(tensor, piece_bytes):
        refuse(f"{path}.sha256", len(digests), f"one for each piece of at most {piece_bytes} bytes")
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
    """The same piece with its codec: of float32 values, by the codec's one name, of the size that it gives."""
    if piece.dtype != "F32":
        refuse(f"{path}.dtype", piece.dtype, "'F32' of an encoded piece")
    name = text(fields["codec"], f"{path}.codec", num_max=CODEC_NAME_MAX)
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
    items = items_of(value, path, num_max=DIMS_MAX)
    return tuple(integer(item, f"{path}[{index}]", low=0, high=BYTES_MAX) for index, item in enumerate(items))


def _check_together(pieces: tuple[Piece, ...], path: str) -> None:
    """Sizes; one dtype and one number of dimensions per tensor; no piece twice; canonical order."""
    total = 0
    kinds: dict[str, tuple[str, int]] = {}
    boxes: set[tuple[str, tuple[int, ...]]] = set()
    for index, piece in enumerate(pieces):
        _check_size(piece.dtype, piece.lengths, f"{path}[{index}]")
        total += max(piece.num_bytes, piece.plain_bytes)
        kind = (piece.dtype, len(piece.lengths))
        if kinds.setdefault(piece.tensor, kind) != kind:
            refuse(f"{path}[{index}]", piece.tensor, "one dtype and one number of dimensions per tensor")
        if (piece.tensor, piece.offsets) in boxes:
            refuse(f"{path}[{index}]", piece.tensor, "each piece once")
        boxes.add((piece.tensor, piece.offsets))
    if total > BYTES_MAX:
        raise ManifestError(f"{path}: {total} bytes together; allowed: at most {BYTES_MAX}")
    if pieces_in_order(pieces) != pieces:
        raise ManifestError(f"{path}: not in canonical order: larger elements first, then by name, then by offsets")


def _check_size(dtype: str, lengths: tuple[int, ...], path: str) -> None:
    size = ITEM_BYTES[dtype]
    for length in lengths:
        size *= max(length, 1)  # a zero must not hide a product that no array library takes
        if size > BYTES_MAX:
            refuse(path, lengths, f"at most {BYTES_MAX} bytes")


def _check_canonical(canonical: bytes, data: bytes) -> None:
    if canonical != data:
        at = bisect_left(range(len(data)), True, key=lambda index: canonical[: index + 1] != data[: index + 1])
        raise ManifestError(
            f"manifest: not canonical from byte {at} on: keys sorted, no spaces, ASCII, shortest floats"
        )


FAULTS_MAX = 20


def check_against(layout: Layout, manifest: VersionManifest | UpdateManifest, *, may_omit: bool = False) -> list[str]:
    """What in the manifest does not fit the expected names, shapes and dtypes; empty when all of it does.

    Args:
        layout: the tensors that are expected: `VersionManifest.layout` of the base version.
        manifest: its pieces must cover every tensor exactly once.
        may_omit: whether a tensor may be left out altogether.

    Returns:
        At most `FAULTS_MAX` faults, and how many there are beyond.
    """
    faults = check_cover(layout, manifest.pieces, may_omit=may_omit)
    return faults[:FAULTS_MAX] + [f"and {len(faults) - FAULTS_MAX} more"] * (len(faults) > FAULTS_MAX)


def _canonical(document: dict[str, Any]) -> bytes:
    return json.dumps(document, sort_keys=True, separators=(",", ":"), allow_nan=False).encode("ascii")
