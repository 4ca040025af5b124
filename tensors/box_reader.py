"""A reader of boxes from a version's file: the inverse of cutting an update into boxes.

The boxes, one after the other and each in C order, form one sequence of bytes. Any range of it can be read, so that a
download resumes at any byte. Whole tensors, and boxes that are contiguous in the file, cost one read.
"""

import bisect
import itertools
import os
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from types import TracebackType
from typing import Self

import numpy as np

from atoll.ground.printable import count_of
from atoll.tensors.layout import Layout, Piece
from atoll.tensors.runs import runs_of

SHORT_RUN = 4096
"""Size [bytes] below which runs are cut out of one covering read, which is two to three times as fast."""

DISTANCE_MAX = 1 << 15
"""Largest distance of short runs in one read [bytes]: a page cache delivers about as much in the time of a read."""

COVERED_BYTES = 1 << 20
"""Largest size of one read that covers several short runs [bytes]."""


class BoxReader:
    """The byte sequence of `boxes`, read from a file with its tensors after `data_start`, in the layout's order."""

    def __init__(self, path: Path, layout: Layout, data_start: int, boxes: Sequence[Piece]) -> None:
        self._path = path
        starts = itertools.accumulate((tensor.num_bytes for tensor in layout), initial=data_start)
        self._tensors = {tensor.name: (tensor.shape, start) for tensor, start in zip(layout, starts, strict=False)}
        self._boxes = [box for box in boxes if box.num_bytes]  # an empty tensor has no runs
        self._ends = list(itertools.accumulate(box.num_bytes for box in self._boxes))
        self._fd = -1
        self._room = bytearray()

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
            parts += self._read_box(box, start - begin, min(stop, end) - begin)
            start, index = min(stop, end), index + 1
        return parts[0] if len(parts) == 1 else b"".join(parts)

    def _read_box(self, box: Piece, start: int, stop: int) -> Iterator[bytes]:
        """Yield the bytes [start, stop) of a box."""
        runs = runs_of(box, *self._tensors[box.tensor])
        first, last = start // runs.size, -(-stop // runs.size)
        while first < last:
            position, alike = runs.at(first)
            count = min(alike, last - first)
            if count > 1 and runs.size < SHORT_RUN and runs.distance <= DISTANCE_MAX:
                data = self._stripe(_Stripe(position, runs.size, runs.distance, count))
                yield data[max(0, start - first * runs.size) : stop - first * runs.size]
            else:
                count = 1
                low, high = max(start, first * runs.size), min(stop, (first + 1) * runs.size)
                yield self._pread(position + low - first * runs.size, high - low)
            first += count

    def _stripe(self, stripe: "_Stripe") -> bytes:
        """Return short runs at equal distances, from few reads that also cover the gaps between them."""
        parts, at_once = [], max(1, COVERED_BYTES // stripe.distance)
        for first in range(0, stripe.count, at_once):
            count = min(at_once, stripe.count - first)
            self._cover(stripe.position + first * stripe.distance, (count - 1) * stripe.distance + stripe.run)
            runs = np.ndarray((count,), np.dtype((np.void, stripe.run)), self._room, strides=(stripe.distance,))
            parts.append(runs.tobytes())
        return parts[0] if len(parts) == 1 else b"".join(parts)

    def _cover(self, position: int, size: int) -> None:
        """Read bytes of the file into the reused buffer."""
        if len(self._room) < size:
            self._room = bytearray(size)
        if os.preadv(self._fd, [memoryview(self._room)[:size]], position) != size:
            raise OSError(f"{self._path}: {count_of(size, 'byte')} at {position} are missing")

    def _pread(self, position: int, size: int) -> bytes:
        data = os.pread(self._fd, size, position)
        if len(data) != size:
            raise OSError(f"{self._path}: {count_of(size, 'byte')} at {position} are missing")
        return data


@dataclass(frozen=True, slots=True)
class _Stripe:
    """A strided set of contiguous runs."""

    position: int
    run: int
    distance: int
    count: int
