"""A safetensors file of whole tensors that several processes write together, each its boxes.

One process makes the file, of its final size; then each writes its boxes at their positions. So the file is the same
however the tensors were sharded, and `box_reader` reads it in any other sharding. Values go through `pwrite`, not
through mapped pages: on a network's file system two nodes may then write into one page.
"""

import itertools
import os
from collections.abc import Iterable, Mapping
from pathlib import Path
from types import TracebackType
from typing import Any, Self

import numpy as np
from numpy.typing import NDArray

from atoll.tensors.layout import ITEM_BYTES, Piece, Tensor, in_order
from atoll.tensors.runs import runs_of
from atoll.tensors.safetensors_file import parse_header
from atoll.tensors.safetensors_header import header_bytes


def make_shared(path: Path, tensors: Iterable[Tensor], metadata: Mapping[str, str] | None = None) -> None:
    """Make the shared file in its final size; all values are zero bits.

    Raises:
        OSError: there is no room for it.
    """
    layout = in_order(tensors)
    header = header_bytes(layout, metadata)
    size = len(header) + sum(tensor.num_bytes for tensor in layout)
    with path.open("wb") as file:
        file.write(header)
        file.flush()
        os.posix_fallocate(file.fileno(), 0, size)


class BoxWriter:
    """One process's access to the shared file, as a context: on its exit the written boxes are durable."""

    def __init__(self, path: Path) -> None:
        self._path = path
        layout, data_start = parse_header(path)
        starts = itertools.accumulate((tensor.num_bytes for tensor in layout), initial=data_start)
        self._tensors = {tensor.name: (tensor.shape, start) for tensor, start in zip(layout, starts, strict=False)}
        self._fd = -1

    def __enter__(self) -> Self:
        self._fd = os.open(self._path, os.O_WRONLY)
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        try:
            if error is None:
                os.fsync(self._fd)
        finally:
            os.close(self._fd)

    def write(self, box: Piece, first: int, values: NDArray[Any]) -> None:
        """Write consecutive elements of a box at their positions in the file.

        Args:
            box: the box of a tensor of the file, in the dtype of the values.
            first: the place of the first one in the box, in C order.
            values: (n) as `NUMPY_DTYPES[box.dtype]`.
        """
        runs, data = runs_of(box, *self._tensors[box.tensor]), np.ascontiguousarray(values).view(np.uint8).data
        start = first * ITEM_BYTES[box.dtype]
        while data:
            number, offset = divmod(start, runs.size)
            taken = data[: runs.size - offset]
            written = os.pwrite(self._fd, taken, runs.at(number)[0] + offset)
            data, start = data[written:], start + written
