"""A reader of stored updates, block by block, in the flat C order of their tensors, for all boxes.

An update lies on disk as it was received: the bytes of its pieces, one after the other, raw or encoded, in one file or
in one for each of its parts. The reader trusts that the boxes cover each tensor exactly once (`coverage.check_cover`,
when the update is accepted), except of an update whose other parts lie elsewhere. It decodes the chunks of an encoded
piece that a block meets: a block of the fold is whole chunks, so that each is decoded once.
"""

import os
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from itertools import islice
from pathlib import Path
from types import TracebackType
from typing import Any, Self

import numpy as np
from numpy.typing import NDArray

from atoll.tensors.codecs.chunks import decode_range
from atoll.tensors.codecs.names import parse_codec
from atoll.tensors.layout import FLOATS, ITEM_BYTES, Piece, Tensor
from atoll.tensors.safetensors_file import NUMPY_DTYPES, parse_header, read_into, to_float32

SHORT_RUN = 64
"""Length of a run [elements] below which an index array scatters it; longer runs are copied as slices."""


@dataclass(frozen=True, slots=True)
class StoredUpdate:
    """The files and pieces of an accepted update."""

    path: Path
    """The file, and the update's name in errors."""
    pieces: tuple[Piece, ...]
    """The pieces in the order of their bytes; the canonical order for received updates."""
    magnitudes: Mapping[str, float | int] = field(default_factory=dict)
    """The largest |element| of each tensor, as `inspection.inspect` recorded it."""
    data_start: int = 0
    """The position of the first piece [bytes]."""
    data: bytes | None = None
    """All bytes of a small update that has no separate file."""
    parts: tuple[tuple[Path, int], ...] = ()
    """The files of an update in parts, each with the number of its pieces; then `path` only names the update."""
    is_partial: bool = False
    """Other parts of the update lie elsewhere: an element in none of these pieces reads as zero."""

    @classmethod
    def of_parts(
        cls,
        path: Path,
        parts: Iterable[tuple[Path, tuple[Piece, ...]]],
        magnitudes: Mapping[str, float | int],
        *,
        is_partial: bool = False,
    ) -> "StoredUpdate":
        """Return an update of several files, each with its pieces.

        Args:
            path: the update's name in errors.
            parts: the files, each with its pieces in the order of their bytes.
            magnitudes: the value of the field.
            is_partial: the value of the field.
        """
        parts = tuple(parts)
        pieces = tuple(piece for _, of_part in parts for piece in of_part)
        files = tuple((file, len(of_part)) for file, of_part in parts)
        return cls(path, pieces, magnitudes, parts=files, is_partial=is_partial)


def stored_model(path: Path) -> StoredUpdate:
    """Return a whole safetensors file, such as a version, as an update to read.

    Raises:
        TensorFileCorrupted: as `safetensors_file.parse_header`.
    """
    layout, data_start = parse_header(path)
    whole = tuple(Piece(t.name, t.dtype, (0,) * len(t.shape), t.shape, "") for t in layout)
    return StoredUpdate(path, whole, data_start=data_start)


def stored_shard(path: Path, pieces: Iterable[Piece]) -> StoredUpdate:
    """Return some pieces of a model in a separate file, as an update to read.

    Raises:
        TensorFileCorrupted: as `safetensors_file.parse_header`.
    """
    _, data_start = parse_header(path)
    return StoredUpdate(path, tuple(pieces), data_start=data_start)


class UpdateReader:
    """An open stored update. Threads may share one: it has no file position.

    A file whose first page is no longer in memory when it is opened does not fit there beside the others: its pages are
    dropped after each read, and evict no others. The pages of a file that is in memory stay.

    Args:
        update: the update to read.
        keep_open: hold one file descriptor for each file from entry to exit; otherwise open the file at each read. An
            update whose bytes are in memory needs none.
    """

    def __init__(self, update: StoredUpdate, *, keep_open: bool = True) -> None:
        self._path, self._is_partial = update.path, update.is_partial
        self._keep_open = keep_open and update.data is None
        self._files: list[_File] = []
        self._pieces: dict[str, list[_Place]] = {}
        self._boxes: dict[str, list[_Box]] = {}
        pieces = iter(update.pieces)
        whole = () if update.is_partial else ((update.path, len(update.pieces)),)
        for path, num_pieces in update.parts or whole:
            file, position = _File(path, update.data), update.data_start
            self._files.append(file)
            for piece in islice(pieces, num_pieces):
                self._pieces.setdefault(piece.tensor, []).append(_Place(piece, file, position))
                position += piece.num_bytes

    def __enter__(self) -> Self:
        if self._keep_open:
            try:
                for file in self._files:
                    file.open()
            except BaseException:
                self._close()
                raise
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._close()

    def _close(self) -> None:
        for file in self._files:
            file.close()

    def carries(self, tensor: str) -> bool:
        """Return whether the update has this tensor."""
        return tensor in self._pieces

    def _of(self, tensor: str) -> Iterator[Piece]:
        return (place.piece for place in self._pieces[tensor])

    def stored_dtype(self, tensor: str) -> str:
        """Return the stored dtype of a float tensor: F32, F16 or BF16; F32 if its boxes differ or are encoded."""
        dtypes = {"F32" if piece.codec else piece.dtype for piece in self._of(tensor)}
        return dtypes.pop() if len(dtypes) == 1 else "F32"

    def read(self, tensor: Tensor, start: int, stop: int, out: NDArray[Any] | None = None) -> NDArray[Any]:
        """Return the elements [start, stop) of a tensor in flat C order: floats as float32 (exact), integers as int64.

        Memory is a small multiple of the block. Each box that the block meets costs one read.

        Args:
            tensor: the tensor of the elements.
            start: the first element.
            stop: the element after the last one.
            out: (stop - start) contiguous, of the dtype of the result, or of `stored_dtype`: receives the block, and is
                returned. A read into used memory takes a third less time than into new.

        Raises:
            KeyError: the update does not carry the tensor.
            IndexError: the range is not inside the tensor.
            TensorFileCorrupted: the file ends early.
            ValueError: the bytes are not what their codec writes.
        """
        if not 0 <= start <= stop <= tensor.num_elements:
            raise IndexError(f"elements {start}..{stop} of tensor {tensor.name!r} are not in 0..{tensor.num_elements}")
        places = self._pieces[tensor.name]
        piece = places[0].piece
        block = np.empty(stop - start, np.float32 if piece.dtype in FLOATS else np.int64) if out is None else out
        if piece.lengths == tensor.shape:
            self._read_piece(places[0], start, block)
            return block
        if self._is_partial:
            block[:] = 0
        for box in self._boxes_of(tensor):
            if box.start < stop and start < box.stop:
                self._gather(box, start, stop, block)
        return block

    def meets(self, tensor: Tensor, start: int, stop: int) -> bool:
        """Return whether a piece may have one of the elements [start, stop); if not, they all read as zeros."""
        places = self._pieces.get(tensor.name)
        if places is None or not self._is_partial or places[0].piece.lengths == tensor.shape:
            return places is not None
        return any(box.start < stop and start < box.stop for box in self._boxes_of(tensor))

    def _boxes_of(self, tensor: Tensor) -> "list[_Box]":
        if tensor.name not in self._boxes:
            self._boxes[tensor.name] = [_box_of(place, tensor.shape) for place in self._pieces[tensor.name]]
        return self._boxes[tensor.name]

    def _gather(self, box: "_Box", start: int, stop: int, block: NDArray[Any]) -> None:
        """Copy the part of `box` within the elements [start, stop) to `block`."""
        first, last = box.runs_below(start - box.run + 1), box.runs_below(stop)
        if first >= last:
            return
        begins = box.begins(first, last) - start
        head = max(0, -int(begins[0]))
        tail = max(0, int(begins[-1]) + box.run - (stop - start))
        size = (last - first) * box.run - head - tail
        if last - first == 1:  # rows of a tensor, one after the other
            low = max(int(begins[0]), 0)
            self._read_piece(box.place, first * box.run + head, block[low : low + size])
            return
        values = np.empty(size, block.dtype)
        self._read_piece(box.place, first * box.run + head, values)
        if box.run < SHORT_RUN:
            index = (begins[:, np.newaxis] + np.arange(box.run)).reshape(-1)
            block[index[head : index.size - tail]] = values
            return
        done = 0
        for begin in begins.tolist():
            low, high = max(begin, 0), min(begin + box.run, stop - start)
            block[low:high] = values[done : done + high - low]
            done += high - low

    def _read_piece(self, place: "_Place", start: int, values: NDArray[Any]) -> None:
        """Read elements of the piece from `start` on, in the order of its bytes, into `values`."""
        if place.piece.codec:
            values[:] = self._decoded(place, start, start + values.size)
            return
        dtype = place.piece.dtype
        as_stored = NUMPY_DTYPES[dtype] == values.dtype
        raw = values if as_stored else np.empty(values.size, NUMPY_DTYPES[dtype])
        place.file.fill(raw, place.position + start * ITEM_BYTES[dtype])
        if not as_stored:
            values[:] = to_float32(raw, dtype) if dtype in FLOATS else raw

    def _decoded(self, place: "_Place", start: int, stop: int) -> NDArray[np.float32]:
        def read(begin: int, num_bytes: int) -> memoryview:
            raw = np.empty(num_bytes, np.uint8)
            place.file.fill(raw, place.position + begin)
            return raw.data

        piece = place.piece
        try:
            return decode_range(parse_codec(piece.codec), piece.num_elements, start, stop, read)
        except ValueError as fault:
            raise ValueError(f"update {self._path}: tensor {piece.tensor!r}: {fault}") from fault


class _File:
    """A file of an update, or its bytes in memory."""

    def __init__(self, path: Path, data: bytes | None) -> None:
        self._path, self._data = path, data
        self._fd: int | None = None
        self._drops = False

    def open(self) -> None:
        self._fd = os.open(self._path, os.O_RDONLY)
        self._drops = not _begins_in_memory(self._fd)

    def close(self) -> None:
        if self._fd is not None:
            os.close(self._fd)
            self._fd = None

    def fill(self, raw: NDArray[Any], position: int) -> None:
        """Read the bytes from `position` on into `raw`."""
        if self._data is not None:
            read_into(raw, self._data, position, path=self._path)
        elif self._fd is not None:
            read_into(raw, self._fd, position, path=self._path)
            if self._drops:
                os.posix_fadvise(self._fd, position, raw.nbytes, os.POSIX_FADV_DONTNEED)
        else:
            fd = os.open(self._path, os.O_RDONLY)
            try:
                read_into(raw, fd, position, path=self._path)
            finally:
                os.close(fd)


@dataclass(frozen=True, slots=True)
class _Place:
    """A piece of an update, and the position of its bytes in a file."""

    piece: Piece
    file: _File
    position: int


def _begins_in_memory(fd: int) -> bool:
    """Return whether a file's first byte is in the page cache: the oldest pages are evicted first."""
    if not hasattr(os, "RWF_NOWAIT"):
        return True  # no Linux
    try:
        os.preadv(fd, [bytearray(1)], 0, os.RWF_NOWAIT)
    except BlockingIOError:
        return False
    except OSError:  # a file system without this flag
        return True
    return True


@dataclass(frozen=True, slots=True)
class _Box:
    """A box as runs: `run` elements that lie side by side both in the tensor and in the file.

    Axes after which the box has the tensor's full lengths are part of the run; the `lengths` of the axes before it
    count the runs, which both the file and the flat tensor hold in C order.
    """

    place: _Place
    lengths: tuple[int, ...]
    strides: tuple[int, ...]  # of the same axes in the flat tensor [elements]
    run: int
    start: int  # flat index of the first element
    stop: int  # behind the flat index of the last element

    def begins(self, first: int, last: int) -> NDArray[np.int64]:
        """Return the flat index of the first element of each of the runs [first, last)."""
        begins = np.full(last - first, self.start, np.int64)
        rest = np.arange(first, last)
        for length, stride in zip(self.lengths[::-1], self.strides[::-1], strict=True):
            rest, index = np.divmod(rest, length)
            begins += index * stride
        return begins

    def runs_below(self, element: int) -> int:
        """Return the number of runs that begin below a flat index: one division per axis, no search."""
        rest = element - self.start
        if rest <= 0:
            return 0
        runs = 0
        inner = [1]
        for length in self.lengths[:0:-1]:
            inner.insert(0, inner[0] * length)
        for length, stride, num_inner in zip(self.lengths, self.strides, inner, strict=True):
            index = (rest - 1) // stride
            if index >= length:
                return runs + length * num_inner
            runs += index * num_inner
            rest -= index * stride
        return runs + 1


def _box_of(place: _Place, shape: tuple[int, ...]) -> _Box:
    piece, strides = place.piece, [1]
    for length in shape[:0:-1]:
        strides.insert(0, strides[0] * length)
    start = sum(offset * stride for offset, stride in zip(piece.offsets, strides, strict=True))
    extent = sum((length - 1) * stride for length, stride in zip(piece.lengths, strides, strict=True))
    axis = len(shape) - 1
    while axis > 0 and piece.lengths[axis] == shape[axis]:
        axis -= 1
    return _Box(
        place=place,
        lengths=piece.lengths[:axis] or (1,),
        strides=tuple(strides[:axis]) or (strides[0] * shape[0],),
        run=piece.lengths[axis] * strides[axis],
        start=start,
        stop=start + extent + 1,
    )
