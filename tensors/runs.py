"""The contiguous runs of a box of a tensor in a file of whole tensors."""

import math
from dataclasses import dataclass

from atoll.tensors.layout import ITEM_BYTES, Piece


@dataclass(frozen=True, slots=True)
class Runs:
    """The contiguous runs of a box in the file, in their order."""

    origin: int
    size: int
    """The size of a run [bytes]."""
    lengths: tuple[int, ...]
    """The numbers of runs along the axes that are not inside a run."""
    strides: tuple[int, ...]
    """The distances of runs along the axes of `lengths` [bytes]."""

    @property
    def distance(self) -> int:
        """The distance of two neighbours along the last of the axes [bytes]."""
        return self.strides[-1] if self.strides else self.size

    def at(self, number: int) -> tuple[int, int]:
        """Return the position of a run, and the number of runs at equal distances that begin with it."""
        position, rest, alike = self.origin, number, 1
        for axis in range(len(self.lengths) - 1, -1, -1):
            rest, index = divmod(rest, self.lengths[axis])
            position += index * self.strides[axis]
            if axis == len(self.lengths) - 1:
                alike = self.lengths[axis] - index
        return position, alike


def runs_of(box: Piece, shape: tuple[int, ...], start: int) -> Runs:
    """Return the runs of a box.

    Args:
        box: a box with at least one element.
        shape: the shape of its tensor.
        start: the start of the tensor in the file [bytes].
    """
    item, axis = ITEM_BYTES[box.dtype], len(shape) - 1  # axes behind it are whole in the box and melt into the run
    while axis > 0 and box.lengths[axis] == shape[axis]:
        axis -= 1
    if axis < 0:  # a scalar
        return Runs(start, item, (), ())
    strides = [item * math.prod(shape[i + 1 :]) for i in range(len(shape))]
    origin = start + sum(o * s for o, s in zip(box.offsets, strides, strict=True))
    return Runs(origin, box.lengths[axis] * strides[axis], box.lengths[:axis], tuple(strides[:axis]))
