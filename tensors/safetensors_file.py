"""Safetensors files, written and read as a stream: no whole model is ever in memory.

A file is a header (`safetensors_header`), then the data. The tensors lie in canonical order (`layout.in_order`), so
every tensor is aligned and the safetensors library loads the file. A file appears under its name complete and durable,
or not at all.
"""

import hashlib
import itertools
import json
import os
import sys
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import replace
from mmap import ACCESS_COPY, mmap
from pathlib import Path
from types import TracebackType
from typing import Any, Self

import numpy as np
from numpy.typing import NDArray

from atoll.ground.folders import sync_folder
from atoll.ground.printable import count_of
from atoll.tensors.layout import ITEM_BYTES, Layout, Piece, Tensor, in_order
from atoll.tensors.pieces import cut, cut_layout
from atoll.tensors.safetensors_header import (
    TensorFileCorrupted as TensorFileCorrupted,  # also for importers
)
from atoll.tensors.safetensors_header import header_bytes, read_header

NUMPY_DTYPES: dict[str, np.dtype[Any]] = {
    "F32": np.dtype("<f4"),
    "F16": np.dtype("<f2"),
    "BF16": np.dtype("<u2"),
    "I64": np.dtype("<i8"),
    "I32": np.dtype("<i4"),
    "I16": np.dtype("<i2"),
    "I8": np.dtype("i1"),
    "U8": np.dtype("u1"),
}
"""The numpy dtype of raw values by safetensors name; bfloat16, which numpy lacks, as uint16."""


BUFFERS = "buffers"
"""The key in a model's header of the list of its untrained float tensors, as JSON; every version keeps it."""


def to_float32(raw: NDArray[Any], dtype: str) -> NDArray[np.float32]:
    """Widen raw float values exactly to float32; F32 values are returned as the same memory.

    Args:
        raw: (*S) values as `NUMPY_DTYPES[dtype]`.
        dtype: F32, F16 or BF16.

    Returns:
        (*S) float32. A bfloat16 is the upper half of a float32.
    """
    if dtype == "F32":
        return raw
    if dtype == "F16":
        return raw.astype(np.float32)
    return (raw.astype(np.uint32) << np.uint32(16)).view(np.float32)


def parse_header(path: Path) -> tuple[Layout, int]:
    """Return the tensors of a file in the order of their bytes, and the position at which the data starts [bytes].

    Raises:
        TensorFileCorrupted: the header breaks the format, or does not describe every byte of the file exactly once.
    """
    layout, _, data_start = read_header(path)
    return layout, data_start


def read_metadata(path: Path) -> dict[str, str]:
    """Return the metadata of a file's header, empty if it has none.

    Raises:
        TensorFileCorrupted: as `parse_header`.
    """
    return read_header(path)[1]


def read_buffers(path: Path) -> frozenset[str]:
    """Return the names of a model's untrained float tensors, as its writer listed them under `BUFFERS`.

    Raises:
        TensorFileCorrupted: the entry is no JSON list of names, or as `parse_header`.
    """
    entry = read_metadata(path).get(BUFFERS, "[]")
    try:
        names = json.loads(entry)
    except ValueError as fault:
        raise TensorFileCorrupted(f"{path}: the header's entry {BUFFERS!r} is not JSON") from fault
    if not (isinstance(names, list) and all(isinstance(name, str) for name in names)):
        raise TensorFileCorrupted(f"{path}: the header's entry {BUFFERS!r} is not a list of names")
    return frozenset(names)


def read(path: Path) -> dict[str, NDArray[Any]]:
    """Return all tensors of a file as arrays of `NUMPY_DTYPES`, for models that fit in memory.

    Raises:
        TensorFileCorrupted: as `parse_header`, or the file ends early.
    """
    layout, position = parse_header(path)
    arrays = {}
    with path.open("rb") as file:
        for tensor in layout:
            array = np.empty(tensor.shape, NUMPY_DTYPES[tensor.dtype])
            read_into(array, file.fileno(), position, path=path)
            arrays[tensor.name] = array
            position += tensor.num_bytes
    return arrays


def mapped(path: Path) -> dict[str, NDArray[Any]]:
    """Return all tensors of a file as arrays over its pages (mmap); the file must not be changed in place.

    A page is read when it is first accessed, and copied when it is written to; the file never changes, and may be
    deleted meanwhile. A tensor that is not aligned to the size of its elements is copied.

    Raises:
        TensorFileCorrupted: as `parse_header`.
    """
    layout, position = parse_header(path)
    with path.open("rb") as file:
        whole = np.frombuffer(mmap(file.fileno(), 0, access=ACCESS_COPY), np.uint8)
    arrays = {}
    for tensor in layout:
        array = whole[position : position + tensor.num_bytes].view(NUMPY_DTYPES[tensor.dtype]).reshape(tensor.shape)
        arrays[tensor.name] = array if array.flags.aligned else array.copy()
        position += tensor.num_bytes
    return arrays


def write(
    path: Path,
    arrays: Mapping[str, NDArray[Any]],
    *,
    dtypes: Mapping[str, str] | None = None,
    metadata: Mapping[str, str] | None = None,
    piece_bytes: int | None = None,
    durable: bool = True,
) -> tuple[Piece, ...]:
    """Write arrays that are in memory, atomically and, unless durable=False, durably.

    Args:
        path: the path of the file; an older one is replaced.
        arrays: the arrays, by name.
        dtypes: safetensors names of the arrays whose numpy dtype does not tell it: BF16 for the bits of bfloat16.
        metadata: free text for the header.
        piece_bytes: the largest size of a piece (`pieces.cut`); left out: each tensor is one piece.
        durable: sync the file and its folder.

    Returns:
        The pieces, in canonical order.

    Raises:
        ValueError: an array's dtype cannot be exchanged, or differs from the one in `dtypes`.
    """
    names = {dtype: name for name, dtype in NUMPY_DTYPES.items() if name != "BF16"}
    tensors = []
    for name, array in arrays.items():
        dtype = (dtypes or {}).get(name) or names.get(array.dtype)
        if dtype not in ITEM_BYTES:
            raise ValueError(f"dtype {dtype or array.dtype} of tensor {name!r} is not one of {', '.join(ITEM_BYTES)}")
        tensors.append(Tensor(name, dtype, array.shape))
    with TensorFileWriter(path, tensors, metadata=metadata, piece_bytes=piece_bytes) as writer:
        for tensor in in_order(tensors):
            if tensor.num_bytes:
                writer.append(arrays[tensor.name])
        return writer.finish(durable=durable)


def pieces_of(layout: Layout, arrays: Mapping[str, NDArray[Any]], piece_bytes: int) -> tuple[Piece, ...]:
    """Return the pieces that `write` returns for arrays of such a layout, without a file."""
    pieces = []
    for tensor in in_order(layout):
        data, position = np.ascontiguousarray(arrays[tensor.name]).reshape(-1).view(np.uint8).data, 0
        for piece in cut(tensor, piece_bytes):
            end = position + piece.num_bytes
            pieces.append(replace(piece, sha256=hashlib.sha256(data[position:end]).hexdigest()))
            position = end
    return tuple(pieces)


def read_into(buffer: NDArray[Any], source: int | bytes, position: int, *, path: Path) -> None:
    """Fill a contiguous array from `position` [bytes] of a source; any number of threads may share the source.

    Args:
        buffer: the array.
        source: a descriptor of an open file, or all bytes of such a file.
        position: the position of the first byte.
        path: the name of the source in errors.

    Raises:
        TensorFileCorrupted: the source ends before the array is full.
    """
    view = buffer.reshape(-1).view(np.uint8).data
    while view:
        count = _read(view, source, position)
        if count == 0:
            raise TensorFileCorrupted(f"{path}: ends at byte {position}, {count_of(len(view), 'byte')} too early")
        view = view[count:]
        position += count


def _read(view: memoryview, source: int | bytes, position: int) -> int:
    if isinstance(source, int):
        return os.preadv(source, [view], position)
    found = source[position : position + len(view)]
    view[: len(found)] = found
    return len(found)


class TensorFileWriter:
    """A writer of one file, block by block; the file appears under its name at `finish`, or never.

    Blocks follow each other in canonical order, each within one tensor:

        with TensorFileWriter(path, layout) as writer:
            for block in blocks:
                writer.append(block)
            pieces = writer.finish()

    Pieces are at most `piece_bytes` long (`pieces.cut`); left out: each tensor is one piece. A shard holds only the
    given `pieces` of a model, a run in canonical order; a tensor that is not whole there has an entry for each piece,
    named with its offsets.

    The bytes grow in `<name>.part` beside the file. Leaving without `finish` removes it; the next attempt overwrites a
    `.part` that a crash left behind.
    """

    def __init__(
        self,
        path: Path,
        layout: Iterable[Tensor],
        *,
        metadata: Mapping[str, str] | None = None,
        piece_bytes: int | None = None,
        pieces: Iterable[Piece] | None = None,
    ) -> None:
        self._path = path
        self._part = path.with_name(path.name + ".part")
        self._cuts = tuple(cut_layout(tuple(layout), piece_bytes or sys.maxsize) if pieces is None else pieces)
        header = header_bytes(_entries(layout, self._cuts), metadata)
        by_tensor = [list(cuts) for _, cuts in itertools.groupby(self._cuts, key=lambda piece: piece.tensor)]
        self._left = [sum(piece.num_bytes for piece in cuts) for cuts in reversed(by_tensor)]  # the current one last
        self._pieces: list[Piece] = []
        self._sha256 = hashlib.sha256()
        self._written = 0  # bytes of the current piece
        self._file = self._part.open("wb")
        self._file.write(header)
        self._close_full()

    def append(self, block: NDArray[Any]) -> None:
        """Write the next elements of the current tensor, in C order.

        Raises:
            ValueError: the block has another dtype than the tensor, or more elements than it lacks.
        """
        if not self._left:
            raise ValueError(f"block of {count_of(block.nbytes, 'byte')} follows the last tensor")
        tensor, dtype = self._cuts[len(self._pieces)].tensor, self._cuts[len(self._pieces)].dtype
        if block.dtype != NUMPY_DTYPES[dtype] or block.nbytes > self._left[-1]:
            raise ValueError(
                f"block of {count_of(block.nbytes, 'byte')} {block.dtype} does not fit tensor {tensor!r}: "
                f"{count_of(self._left[-1], 'byte')} {dtype} are missing"
            )
        data = np.ascontiguousarray(block).reshape(-1).view(np.uint8).data
        self._file.write(data)
        self._left[-1] -= block.nbytes
        while data:
            part = data[: self._cuts[len(self._pieces)].num_bytes - self._written]
            self._sha256.update(part)
            self._written += part.nbytes
            self._close_full()
            data = data[part.nbytes :]

    def finish(self, *, durable: bool = True) -> tuple[Piece, ...]:
        """Make the file durable, then give it its name; return its pieces, in canonical order.

        With durable=False neither the file nor its folder is synced: that is left to the caller.

        Raises:
            ValueError: a tensor is not complete.
        """
        if self._left:
            raise ValueError(f"tensor {self._cuts[len(self._pieces)].tensor!r} is not complete")
        self._file.flush()
        if durable:
            os.fsync(self._file.fileno())
        self._file.close()
        os.replace(self._part, self._path)
        if durable:
            sync_folder(self._path.parent)
        return tuple(self._pieces)

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if not self._file.closed:
            self._file.close()
            self._part.unlink()

    def _close_full(self) -> None:
        """Step past full pieces and full tensors; those without elements are full."""
        while len(self._pieces) < len(self._cuts):
            piece = self._cuts[len(self._pieces)]
            if self._written < piece.num_bytes:
                break
            self._pieces.append(replace(piece, sha256=self._sha256.hexdigest()))
            self._sha256 = hashlib.sha256()
            self._written = 0
        while self._left and not self._left[-1]:
            self._left.pop()


def _entries(layout: Iterable[Tensor], pieces: Iterable[Piece]) -> Iterator[Tensor]:
    """Yield the entries of the header, in the order of the bytes."""
    whole = {tensor.name: tensor for tensor in layout}
    for name, of_tensor in itertools.groupby(pieces, key=lambda piece: piece.tensor):
        cuts = list(of_tensor)
        if sum(piece.num_elements for piece in cuts) == whole[name].num_elements:
            yield whole[name]
        else:
            yield from (Tensor(f"{name}@{','.join(map(str, p.offsets))}", p.dtype, p.lengths) for p in cuts)
