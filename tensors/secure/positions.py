"""The positions of a model's elements in the key streams, which depend on the layout alone.

Tensors lie one after the other: the floats in canonical order, then `secure/exact`, as `masked_layout` has them; each
begins at a multiple of four words, so that a block of 16 bytes belongs to one tensor. Element e of a tensor, in C
order, has the word start + e. So each owner of a box of a tensor, one process or a rank of a mesh, masks it with the
same words. A word of `secure/exact` has 8 bytes, and its block lies behind all blocks of the floats.
"""

import math

import numpy as np

from atoll.tensors.layout import ITEM_BYTES, Layout, Piece
from atoll.tensors.runs import runs_of
from atoll.tensors.secure.keystream import Runs

ALIGNMENT = 4
"""Words to a multiple of which a tensor's start is rounded up: one block of 32-bit words, two of 64."""


def starts_of(layout: Layout) -> dict[str, int]:
    """Return the position of each tensor's first element; the layout is that of a masked update, in its order."""
    starts, position = {}, 0
    for tensor in layout:
        starts[tensor.name] = position
        position += -(-tensor.num_elements // ALIGNMENT) * ALIGNMENT
    return starts


def runs_between(box: Piece, shape: tuple[int, ...], start: int, first: int, last: int) -> Runs:
    """Return the runs of some elements of a box, as rows of first position and number of words, in their order.

    Args:
        box: of a tensor.
        shape: of the tensor.
        start: position of the tensor.
        first: the first of the elements, in the C order of the box.
        last: the element behind the last one.
    """
    if first >= last:
        return np.zeros((0, 2), np.int64)
    item = ITEM_BYTES[box.dtype]
    runs = runs_of(box, shape, start * item)
    size = runs.size // item
    begin, end = first // size, -(-last // size)
    found = np.empty((end - begin, 2), np.int64)
    found[:, 0], found[:, 1] = runs.origin // item, size
    rest = np.arange(begin, end)
    for length, stride in zip(runs.lengths[::-1], runs.strides[::-1], strict=True):
        rest, index = np.divmod(rest, length)
        found[:, 0] += index * (stride // item)
    head, tail = first - begin * size, end * size - last
    found[0] += (head, -head)
    found[-1, 1] -= tail
    return found


def is_whole(box: Piece, shape: tuple[int, ...]) -> bool:
    """Return whether a box is a run of positions: its elements follow each other in the tensor."""
    return not box.num_elements or math.prod(runs_of(box, shape, 0).lengths) == 1
