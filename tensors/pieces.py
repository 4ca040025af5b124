"""The cut of a model into pieces: a function of its layout alone, so that a version's identity depends on nothing else.

A large tensor is cut into boxes that follow each other in its flat C order: along the first axis of which at least one
index fits into a piece, and at every index of the axes before it. So the pieces of a model, one after the other, are
the bytes of its file; a rank that owns some of them owns a run of bytes, and each piece can be fetched and checked by
itself.
"""

import itertools
import math
from collections.abc import Iterable, Iterator

from atoll.tensors.layout import ITEM_BYTES, Layout, Piece, Tensor, in_order

PIECE_BYTES_MIN = 1 << 22
"""Size [bytes] up to which a tensor is one piece."""

PIECES_WANTED = 4096
"""Approximate largest number of pieces of a model of large tensors: its manifest stays small, whatever the model's
size."""


def piece_bytes_of(layout: Layout) -> int:
    """Return the largest size of a piece of a model [bytes].

    It is the least power of two from 4 MiB on with which the model's bytes make at most `PIECES_WANTED` full pieces.
    """
    piece_bytes, num_bytes = PIECE_BYTES_MIN, sum(tensor.num_bytes for tensor in layout)
    while piece_bytes * PIECES_WANTED < num_bytes:
        piece_bytes *= 2
    return piece_bytes


def num_cuts(tensor: Tensor, piece_bytes: int) -> int:
    """Return the number of pieces that `cut` makes, without making them."""
    axis, step = _axis_and_step(tensor, piece_bytes)
    return math.prod(tensor.shape[:axis]) * -(-tensor.shape[axis] // step) if step else 1


def cut(tensor: Tensor, piece_bytes: int) -> Iterator[Piece]:
    """Yield the pieces of one tensor, without digests, in the order of their bytes; each at most `piece_bytes` >= 8."""
    shape, (axis, step) = tensor.shape, _axis_and_step(tensor, piece_bytes)
    if not step:
        yield Piece(tensor.name, tensor.dtype, (0,) * len(shape), shape, "")
        return
    behind = shape[axis + 1 :]
    for index in itertools.product(*map(range, shape[:axis])):
        for start in range(0, shape[axis], step):
            lengths = (*(1 for _ in index), min(step, shape[axis] - start), *behind)
            yield Piece(tensor.name, tensor.dtype, (*index, start, *(0 for _ in behind)), lengths, "")


def _axis_and_step(tensor: Tensor, piece_bytes: int) -> tuple[int, int]:
    """Return the axis along which a tensor is cut, and the number of its indices in one piece; 0 for a whole tensor."""
    if tensor.num_bytes <= piece_bytes:
        return 0, 0
    axis = 0
    while (row_bytes := ITEM_BYTES[tensor.dtype] * math.prod(tensor.shape[axis + 1 :])) > piece_bytes:
        axis += 1
    return axis, piece_bytes // row_bytes


def cut_layout(layout: Layout, piece_bytes: int) -> Iterator[Piece]:
    """Yield the pieces of all tensors, without digests, in canonical order."""
    return itertools.chain.from_iterable(cut(tensor, piece_bytes) for tensor in in_order(layout))


def layout_of_pieces(pieces: Iterable[Piece]) -> Layout:
    """Return the tensors that pieces in canonical order cover."""
    last = {piece.tensor: piece for piece in pieces}
    return tuple(
        Tensor(name, piece.dtype, tuple(o + n for o, n in zip(piece.offsets, piece.lengths, strict=True)))
        for name, piece in last.items()
    )


def first_element(piece: Piece, tensor: Tensor) -> int:
    """Return the flat index, in its tensor, of the first element of a piece of `cut`."""
    flat = 0
    for offset, length in zip(piece.offsets, tensor.shape, strict=True):
        flat = flat * length + offset
    return flat


def part_name(index: int) -> str:
    """Return the name of the file of a part of an update."""
    return f"part.{index:04d}"
