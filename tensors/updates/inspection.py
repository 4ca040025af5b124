"""The inspection of every byte of a stored update before it is accepted; encoded pieces are inspected decoded.

It can keep pace with the upload: then little is left to do when the last byte has arrived.
"""

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

from atoll.ground.printable import count_of
from atoll.tensors.codecs.chunks import chunk_bounds, encoded_bytes
from atoll.tensors.codecs.names import parse_codec
from atoll.tensors.layout import FLOATS, ITEM_BYTES, Piece
from atoll.tensors.safetensors_file import NUMPY_DTYPES, read_into
from atoll.tensors.updates.tensor_stats import BYTES_MAX, Tally

TILE_ELEMENTS = 1 << 16
"""Number of elements of a tile. Squares are summed within tiles of a piece, then over the tiles; an encoded chunk is a
tile."""

ALIGNED_BYTES = 8
"""The alignment of the elements of every dtype."""

Buffer = bytes | bytearray | memoryview


@dataclass(frozen=True, slots=True)
class Inspection:
    """The result of inspecting an update's bytes: digests, finiteness, magnitudes, norms."""

    wrong_digests: tuple[Piece, ...]
    """The pieces whose SHA-256 differs from the manifest's."""
    non_finite: Mapping[str, int]
    """The number of NaN and infinite elements of each tensor that has any; such elements count nowhere else."""
    magnitudes: Mapping[str, float | int]
    """The largest |element| of each tensor: float of float tensors, int of integer tensors; 0 of an empty one."""
    squared_norms: Mapping[str, float]
    """The sum of the squared elements of each tensor, in float64."""
    malformed: Mapping[str, str] = field(default_factory=dict)
    """The first malformed chunk of each tensor, and why its codec refuses it; later chunks count nowhere."""

    @property
    def is_sound(self) -> bool:
        """Whether every digest is right, every chunk well-formed, and every element finite."""
        return not (self.wrong_digests or self.malformed or self.non_finite)


class Merged:
    """The magnitudes and norms of an update, merged from its parts in any order."""

    def __init__(self) -> None:
        self.magnitudes: dict[str, float | int] = {}
        """The largest |element| of each tensor: exactly the whole update's."""
        self._terms: dict[str, list[float]] = {}

    def add(self, magnitudes: Mapping[str, float | int], squared_norms: Mapping[str, float]) -> None:
        """Add the magnitudes and squared norms of one part."""
        for name, magnitude in magnitudes.items():
            self.magnitudes[name] = max(self.magnitudes.get(name, magnitude), magnitude)
        for name, squared in squared_norms.items():
            self._terms.setdefault(name, []).append(squared)

    @property
    def squared_norms(self) -> dict[str, float]:
        """The sum of the squared elements of each tensor, the parts' sums added exactly and rounded once."""
        return {name: math.fsum(of_tensor) for name, of_tensor in self._terms.items()}


def inspect(
    path: Path,
    pieces: Iterable[Piece],
    *,
    data: bytes | None = None,
    data_start: int = 0,
    has_values: bool = True,
) -> Inspection:
    """Verify digests and finiteness, and record magnitudes and norms, in one pass.

    Memory is a few tiles. Pieces must be of known dtypes (`coverage.check_cover`). The magnitudes and norms of an
    encoded piece are those of the values that the fold will read.

    Args:
        path: the file with the bytes of the pieces, one after the other.
        pieces: the pieces, in the order of their bytes.
        data: the same bytes, if they are in memory; then `path` is only their name in errors.
        data_start: the position of the first piece [bytes].
        has_values: False for the words of masked updates, which are random: only their digests are verified.

    Raises:
        TensorFileCorrupted: the bytes end before the last piece.
    """
    return Inspector(path, pieces, data=data, data_start=data_start, has_values=has_values).finish()


class Inspector:
    """Inspection of an update while its bytes still arrive; arguments and results are those of `inspect`, to the bit.

    Between two calls it holds an open file, and no bytes.
    """

    def __init__(
        self,
        path: Path,
        pieces: Iterable[Piece],
        *,
        data: bytes | None = None,
        data_start: int = 0,
        has_values: bool = True,
    ) -> None:
        self._path, self._data, self._position, self._has_values = path, data, data_start, has_values
        self._pieces = iter(pieces)
        self._wrong_digests: list[Piece] = []
        self._tallies: dict[str, Tally] = {}
        self._last: Buffer = b""
        self._last_begin = 0
        self._steps = self._inspect()
        self.next_end: float = 0.0
        """The number of bytes that the next tile needs; infinite after the last one."""

    def advance(self, end: int, last: Buffer = b"") -> None:
        """Inspect all tiles that have arrived, once the bytes before `end` are there.

        Args:
            end: the number of bytes that have arrived.
            last: the last of these bytes, if they are in memory: a tile within them is not read from the file again.

        Raises:
            TensorFileCorrupted: the bytes are not there.
        """
        self._last, self._last_begin = last, end - len(last)
        while self.next_end <= end:
            self.next_end = next(self._steps, math.inf)
        self._last = b""

    def finish(self) -> Inspection:
        """Inspect the rest and return the result."""
        for _ in self._steps:
            pass
        self.next_end, tallies = math.inf, self._tallies
        return Inspection(
            wrong_digests=tuple(self._wrong_digests),
            non_finite={name: tally.non_finite for name, tally in tallies.items() if tally.non_finite},
            magnitudes={name: tally.magnitude for name, tally in tallies.items()},
            squared_norms={name: tally.squared_norm for name, tally in tallies.items()},
            malformed={name: tally.malformed for name, tally in tallies.items() if tally.malformed},
        )

    def _inspect(self) -> Iterator[int]:
        """Inspect one tile at a time; before each, yield the number of bytes that it needs."""
        with _opened(self._path, self._data) as source:
            for piece in self._pieces:
                tally = Tally(0.0 if piece.dtype in FLOATS else 0)
                if self._has_values:
                    tally = self._tallies.setdefault(piece.tensor, tally)
                sha256 = hashlib.sha256()
                if piece.codec:
                    tally.malformed = tally.malformed or _unreadable(piece)
                for num_elements, num_bytes in _tiles(piece):
                    yield self._position + num_bytes
                    self._inspect_tile(piece, tally, sha256, self._read(source, num_bytes), num_elements)
                    self._position += num_bytes
                if sha256.hexdigest() != piece.sha256:
                    self._wrong_digests.append(piece)

    def _inspect_tile(self, piece: Piece, tally: Tally, sha256: Any, raw: NDArray[np.uint8], num_elements: int) -> None:
        sha256.update(raw.data)
        if not self._has_values:
            return
        if piece.codec:
            tally.add_chunk(piece.codec, raw.data, num_elements)
        else:
            tally.add(raw.view(NUMPY_DTYPES[piece.dtype]), piece.dtype)

    def _read(self, source: int | bytes, num_bytes: int) -> NDArray[np.uint8]:
        begin = self._position - self._last_begin
        if begin >= 0 and begin + num_bytes <= len(self._last):
            there = np.frombuffer(self._last, np.uint8, num_bytes, begin)
            return there if there.ctypes.data % ALIGNED_BYTES == 0 else there.copy()
        raw = np.empty(num_bytes, np.uint8)
        read_into(raw, source, self._position, path=self._path)
        return raw


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


def _unreadable(piece: Piece) -> str:
    """Return the reason why an encoded piece cannot be decoded here; empty: its codec and size are right."""
    try:
        size = encoded_bytes(parse_codec(piece.codec), piece.num_elements)
    except ValueError as fault:
        return str(fault)
    got = f"{count_of(piece.num_bytes, 'byte')} for {count_of(piece.num_elements, 'element')}"
    return "" if size == piece.num_bytes else f"{piece.codec}: {got}, not {size}"


def _tiles(piece: Piece) -> Iterator[tuple[int, int]]:
    """Yield each tile's number of elements and of bytes. The tiles of an encoded piece are its chunks."""
    if piece.codec and _unreadable(piece):  # only its digest can be checked
        for begin in range(0, piece.num_bytes, TILE_ELEMENTS):
            yield 0, min(TILE_ELEMENTS, piece.num_bytes - begin)
        return
    if piece.codec:
        codec = parse_codec(piece.codec)
        for start, stop in chunk_bounds(piece.num_elements):
            yield stop - start, codec.num_bytes(stop - start)
        return
    # squares of integers of one byte have an exact sum, however they are divided: larger tiles take less time
    tile_elements = TILE_ELEMENTS if ITEM_BYTES[piece.dtype] > 1 else BYTES_MAX
    for begin in range(0, piece.num_elements, tile_elements):
        num_elements = min(tile_elements, piece.num_elements - begin)
        yield num_elements, num_elements * ITEM_BYTES[piece.dtype]
