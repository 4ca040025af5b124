"""The layout of a model's numbers: tensors, boxes of tensors, pieces. Values only, no arrays.

A *layout* is the ordered tuple of a model's tensors. A *piece* is an N-d box of one tensor, stored contiguously in
C order, little-endian. A plain client has one piece per tensor; a rank of a sharded client has the boxes of its shard.
The canonical order of pieces (and of the tensors in a version's file) is by element size, largest first, then by name,
then by offsets: the order that safetensors uses, so that every tensor is aligned. An encoded piece is stored and
ordered as bytes, whatever it decodes to.
"""

import math
from collections.abc import Iterable
from dataclasses import dataclass

ITEM_BYTES = {"F32": 4, "F16": 2, "BF16": 2, "I64": 8, "I32": 4, "I16": 2, "I8": 1, "U8": 1}
"""Element size [bytes] of the dtypes that may be exchanged, by their safetensors names."""

FLOATS = frozenset({"F32", "F16", "BF16"})
"""The float dtypes among `ITEM_BYTES`; all others are integers."""

WIDER = {"U8": "I16", "I8": "I16", "I16": "I32", "I32": "I64"}
"""The dtype of an update, by the dtype of the model's integer tensor, if differences local - global overflow it."""

CONTROL = "control/"
"""The prefix that makes the name of SCAFFOLD's control variate, a tensor beside the model's, from its parameter's name.
No tensor of a model may have a name with this prefix."""

SHARED = "algorithm/"
"""The prefix of a tensor that a custom algorithm sends beside the model's, both ways."""

STATE = "state/"
"""The prefix of a tensor that a custom algorithm keeps at a client, in the file of the client's state."""

OPTIMIZER = "optimizer/"
"""The prefix of a tensor of the local optimizer's state, in the same file."""

SECURE = "secure/"
"""The prefix of the tensor of a masked update that holds the numbers which a secure sum adds exactly."""

BESIDE = (CONTROL, SHARED, SECURE)
"""The prefixes of the tensors beside the model's: no server optimizer moves them, no codec encodes them, and no file of
a model has them. For `str.startswith`."""


def update_dtypes(dtype: str) -> frozenset[str]:
    """Return the dtypes that an update of a tensor may have: any float for a float, the same or `WIDER` otherwise."""
    return FLOATS if dtype in FLOATS else frozenset({dtype, WIDER.get(dtype, dtype)})


@dataclass(frozen=True, slots=True)
class Tensor:
    """One named tensor of a model."""

    name: str
    dtype: str
    shape: tuple[int, ...]

    @property
    def num_elements(self) -> int:
        """The product of the shape; 1 for a scalar."""
        return math.prod(self.shape)

    @property
    def num_bytes(self) -> int:
        """The size of the whole tensor [bytes]."""
        return self.num_elements * ITEM_BYTES[self.dtype]


@dataclass(frozen=True, slots=True)
class Piece:
    """A stored and sent box of one tensor; `sha256` is the digest of its bytes."""

    tensor: str
    dtype: str
    offsets: tuple[int, ...]
    lengths: tuple[int, ...]
    sha256: str
    codec: str = ""
    """The codec of its values (`codecs/names`); empty for raw values."""
    encoded_bytes: int = 0
    """The size of an encoded piece [bytes]: `chunks.encoded_bytes` of the codec and the number of elements."""

    @property
    def num_elements(self) -> int:
        """The product of the lengths; 1 for a scalar."""
        return math.prod(self.lengths)

    @property
    def num_bytes(self) -> int:
        """The size of the stored and sent piece [bytes]."""
        return self.encoded_bytes if self.codec else self.plain_bytes

    @property
    def plain_bytes(self) -> int:
        """The size of the piece's raw values, as `dtype` [bytes]."""
        return self.num_elements * ITEM_BYTES[self.dtype]


Layout = tuple[Tensor, ...]


def in_order(tensors: Iterable[Tensor]) -> Layout:
    """Return the tensors in canonical order."""
    return tuple(sorted(tensors, key=lambda t: (-ITEM_BYTES[t.dtype], t.name)))


def pieces_in_order(pieces: Iterable[Piece]) -> tuple[Piece, ...]:
    """Return the pieces in canonical order."""
    return tuple(sorted(pieces, key=lambda p: (-(1 if p.codec else ITEM_BYTES[p.dtype]), p.tensor, p.offsets)))
