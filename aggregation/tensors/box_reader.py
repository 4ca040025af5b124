"""A reader of boxes from a version's file: the inverse of cutting an update into boxes.

The boxes, one after the other and each in C order, form one sequence of bytes. Any range of it can be read, so that a
download resumes at any byte. Whole tensors, and boxes that are contiguous in the file, cost one read.
"""

import bisect
import itertools
import math
import os
from collections.abc import Iterator, Sequence
from pathlib import Path
from types import TracebackType
from typing import Self

from atoll.aggregation.printable import count_of
from atoll.aggregation.tensors.layout import ITEM_BYTES, Layout, Piece


class BoxReader:
    """The byte sequence of `boxes`, read from a file with its tensors after `data_start`, in the layout's order."""

    def __init__(self, path: Path, layout: Layout, data_start: int, boxes: Sequence[Piece]) -> None:
        self._path = path
        starts = itertools.accumulate((tensor.num_bytes for tensor in layout), initial=data_start)
        self._tensors = {tensor.name: (tensor.shape, start) for tensor, start in zip(layout, starts, strict=False)}
        self._boxes = boxes
        self._ends = list(itertools.accumulate(box.num_bytes for box in boxes))
        self._fd = -1

    def __enter__(self) -> Self:
        self._fd = os.open(self._path, os.O_RDONLY)
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        os.close(self._fd)

    def read(self, start: int, stop: int) -> bytes:
        """Return the bytes [start, stop) of the sequence.

        Raises:
            OSError: the file is shorter than its manifest says.
        """
        parts: list[bytes] = []
        index = bisect.bisect_right(self._ends, start)
        while start < stop:
            box, end = self._boxes[index], self._ends[index]
            begin = end - box.num_bytes
            for position, size in self._runs(box, start - begin, min(stop, end) - begin):
                parts.append(self._pread(position, size))
            start, index = min(stop, end), index + 1
        return parts[0] if len(parts) == 1 else b"".join(parts)

    def _pread(self, position: int, size: int) -> bytes:
        data = os.pread(self._fd, size, position)
        if len(data) != size:
            raise OSError(f"{self._path}: {count_of(size, 'byte')} at {position} are missing")
        return data

    def _runs(self, box: Piece, start: int, stop: int) -> Iterator[tuple[int, int]]:
        """Yield (file position, size) of each contiguous run that holds bytes [start, stop) of the box."""
        shape, base = self._tensors[box.tensor]
        item = ITEM_BYTES[box.dtype]
        axis = len(shape) - 1  # axes behind it are whole in the box and melt into the run
        while axis > 0 and box.lengths[axis] == shape[axis]:
            axis -= 1
        if axis < 0:  # a scalar
            yield base + start, stop - start
            return
        strides = [item * math.prod(shape[i + 1 :]) for i in range(len(shape))]
        run = box.lengths[axis] * strides[axis]
        origin = base + sum(o * s for o, s in zip(box.offsets, strides, strict=True))
        for number in range(start // run, -(-stop // run)):
            position, rest = origin, number
            for i in range(axis - 1, -1, -1):
                rest, index = divmod(rest, box.lengths[i])
                position += index * strides[i]
            low, high = max(start, number * run), min(stop, (number + 1) * run)
            yield position + low - number * run, high - low
