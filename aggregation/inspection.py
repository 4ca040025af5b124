"""Looks at every byte of a stored update once, before it is accepted; of encoded pieces at what they decode to."""

import hashlib
import math
import os
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from atoll.aggregation.chunks import chunk_bounds
from atoll.aggregation.codecs import parse_codec
from atoll.aggregation.layout import FLOATS, ITEM_BYTES, Piece
from atoll.aggregation.tensorfile import NUMPY_DTYPES, read_into, to_float32

BUFFER_BYTES = 1 << 22
"""What is read from the file at once."""

TILE_ELEMENTS = 1 << 16
"""Squares are summed within tiles of this many elements of a piece, then tile after tile; a chunk is one tile."""


@dataclass(frozen=True, slots=True)
class Inspection:
    """What the bytes of an update say."""

    wrong_digests: tuple[Piece, ...]
    """Pieces whose bytes do not have the SHA-256 of the manifest."""
    non_finite: Mapping[str, int]
    """Number of NaN and infinite elements of each tensor that has any; such elements count nowhere else."""
    magnitudes: Mapping[str, float | int]
    """Largest |element| of each tensor: float of float tensors, int of integer tensors; 0 of an empty one."""
    squared_norms: Mapping[str, float]
    """Sum of the squared elements of each tensor, in float64."""
    malformed: Mapping[str, str] = field(default_factory=dict)
    """The first chunk of each tensor that its codec does not take, and why; what follows it counts nowhere."""

    @property
    def is_sound(self) -> bool:
        """Whether every digest is right, every chunk what its codec writes, and every element finite."""
        return not (self.wrong_digests or self.malformed or self.non_finite)


def inspect(path: Path, pieces: Iterable[Piece], *, data: bytes | None = None, data_start: int = 0) -> Inspection:
    """Verify digests and finiteness, and record magnitudes and norms, in one pass.

    Memory is one buffer of 4 MiB and a few tiles. Pieces must be of known dtypes (`cover.check_cover`). The magnitudes
    and norms of an encoded piece are those of the values that the fold will read.

    Args:
        path: the file with the bytes of the pieces, one after the other.
        pieces: in the order of their bytes.
        data: the same bytes, when they are in memory; then `path` is only what errors call them.
        data_start: where the first piece begins [bytes].

    Raises:
        TensorFileCorrupted: the bytes end before the last piece.
    """
    wrong_digests: list[Piece] = []
    tallies: dict[str, _Tally] = {}
    position = data_start
    with _opened(path, data) as source:
        for piece in pieces:
            tally = tallies.setdefault(piece.tensor, _Tally(0.0 if piece.dtype in FLOATS else 0))
            sha256 = hashlib.sha256()
            if piece.codec:
                for chunk, num_elements in _chunks(piece, source, position, path):
                    sha256.update(chunk)
                    tally.add_chunk(piece.codec, chunk, num_elements)
            else:
                for raw in _buffers(piece, source, position, path):
                    sha256.update(raw.data)
                    for begin in range(0, raw.size, TILE_ELEMENTS):
                        tally.add(raw[begin : begin + TILE_ELEMENTS], piece.dtype)
            if sha256.hexdigest() != piece.sha256:
                wrong_digests.append(piece)
            position += piece.num_bytes
    return Inspection(
        wrong_digests=tuple(wrong_digests),
        non_finite={name: tally.non_finite for name, tally in tallies.items() if tally.non_finite},
        magnitudes={name: tally.magnitude for name, tally in tallies.items()},
        squared_norms={name: tally.squared_norm for name, tally in tallies.items()},
        malformed={name: tally.malformed for name, tally in tallies.items() if tally.malformed},
    )


@contextmanager
def _opened(path: Path, data: bytes | None) -> Iterator[int | bytes]:
    if data is not None:
        yield data
        return
    fd = os.open(path, os.O_RDONLY)
    try:
        yield fd
    finally:
        os.close(fd)


def _buffers(piece: Piece, source: int | bytes, position: int, path: Path) -> Iterator[NDArray[Any]]:
    item_bytes = ITEM_BYTES[piece.dtype]
    step = BUFFER_BYTES // item_bytes
    for begin in range(0, piece.num_elements, step):
        raw = np.empty(min(step, piece.num_elements - begin), NUMPY_DTYPES[piece.dtype])
        read_into(raw, source, position + begin * item_bytes, path=path)
        yield raw


def _chunks(piece: Piece, source: int | bytes, position: int, path: Path) -> Iterator[tuple[memoryview, int]]:
    """The bytes of each chunk of an encoded piece, and its elements."""
    codec = parse_codec(piece.codec)
    for start, stop in chunk_bounds(piece.num_elements):
        raw = np.empty(codec.num_bytes(stop - start), np.uint8)
        read_into(raw, source, position, path=path)
        yield raw.data, stop - start
        position += raw.size


@dataclass(slots=True)
class _Tally:
    """What is known so far of one tensor."""

    magnitude: float | int
    non_finite: int = 0
    squared_norm: float = 0.0
    malformed: str = ""

    def add_chunk(self, codec: str, chunk: memoryview, num_elements: int) -> None:
        """Count what a chunk decodes to; nothing of a tensor that has had a malformed one."""
        if self.malformed:
            return
        try:
            self.add(parse_codec(codec).decode(chunk, num_elements), "F32")
        except ValueError as fault:
            self.malformed = str(fault)

    def add(self, raw: NDArray[Any], dtype: str) -> None:
        values = to_float32(raw, dtype) if dtype in FLOATS else raw
        low, high = values.min().item(), values.max().item()
        if not (math.isfinite(low) and math.isfinite(high)):
            values = values[np.isfinite(values)]
            self.non_finite += raw.size - values.size
            low, high = (values.min().item(), values.max().item()) if values.size else (0.0, 0.0)
        self.magnitude = max(self.magnitude, -low, high)
        squares = values.astype(np.float64)
        self.squared_norm += float(np.square(squares, out=squares).sum())
