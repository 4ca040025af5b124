"""The coverage of a model by an update's pieces: each element of every tensor exactly once."""

from collections.abc import Iterable, Mapping

import numpy as np

from atoll.aggregation.printable import count_of
from atoll.aggregation.tensors.layout import FLOATS, Layout, Piece, Tensor, update_dtypes

BOXES_MAX = 1024
"""Largest number of boxes of one tensor: the number of ranks over which a client may shard it."""

ROWS_AT_ONCE = 64
"""Number of boxes that are compared with all later ones at a time: at most 64 x 1,024 comparisons per axis."""


def check_cover(layout: Layout, pieces: Iterable[Piece], *, may_omit: bool = False) -> list[str]:
    """List all faults of an update's pieces; none if they cover the layout.

    A float tensor travels in its own dtype or as F32, an integer tensor in its own; all boxes of a tensor in one dtype.
    A tensor without elements travels as one box of its full (empty) shape.

    The time is bounded for hostile pieces too: each box of a known tensor is compared with at most `BOXES_MAX` others
    (more boxes are one fault and are not examined), so n pieces cost at most 1,024 n comparisons per axis, in numpy.

    Args:
        layout: the model's tensors.
        pieces: as the client declares them, untrusted.
        may_omit: allow that whole tensors are missing.

    Returns:
        Faults, each with the tensor, the value and what is allowed.
    """
    boxes = _by_tensor(pieces)
    faults = _unknown(layout, boxes)
    for tensor in layout:
        if tensor.name in boxes:
            faults += _faults_of(tensor, boxes[tensor.name])
        elif not may_omit:
            faults.append(f"tensor {tensor.name!r} is missing: {count_of(tensor.num_elements, 'element')}")
    return faults


def check_inside(layout: Layout, pieces: Iterable[Piece]) -> list[str]:
    """List the faults that some of an update's pieces have without the others: their tensors, dtypes and places.

    The time is as in `check_cover`, without the comparisons of boxes.
    """
    boxes = _by_tensor(pieces)
    faults = _unknown(layout, boxes)
    for tensor in layout:
        if tensor.name in boxes:
            found, misplaced = _faults_inside(tensor, boxes[tensor.name])
            faults += found + misplaced
    return faults


def _by_tensor(pieces: Iterable[Piece]) -> dict[str, list[Piece]]:
    boxes: dict[str, list[Piece]] = {}
    for piece in pieces:
        boxes.setdefault(piece.tensor, []).append(piece)
    return boxes


def _unknown(layout: Layout, boxes: Mapping[str, list[Piece]]) -> list[str]:
    known = {tensor.name for tensor in layout}
    return [f"tensor {name!r} is not one of the model's {len(known)}" for name in boxes if name not in known]


def _faults_inside(tensor: Tensor, boxes: list[Piece]) -> tuple[list[str], list[str]]:
    """List the faults of the boxes' number and dtypes, and those of their places."""
    if len(boxes) > BOXES_MAX:
        return [], [f"tensor {tensor.name!r} has {count_of(len(boxes), 'box', 'boxes')}, allowed are {BOXES_MAX}"]
    return _dtype_faults(tensor, boxes), [fault for box in boxes if (fault := _misplaced(tensor, box))]


def _faults_of(tensor: Tensor, boxes: list[Piece]) -> list[str]:
    faults, misplaced = _faults_inside(tensor, boxes)
    if misplaced:
        return faults + misplaced
    if tensor.num_elements == 0:
        return faults + (
            [f"tensor {tensor.name!r} is empty and has {count_of(len(boxes), 'box', 'boxes')}, not 1"]
            if boxes[1:]
            else []
        )
    return faults + _tiling_faults(tensor, boxes)


def _dtype_faults(tensor: Tensor, boxes: list[Piece]) -> list[str]:
    allowed = sorted({tensor.dtype, "F32"} if tensor.dtype in FLOATS else update_dtypes(tensor.dtype))
    dtypes = sorted({box.dtype for box in boxes})
    faults = [
        f"tensor {tensor.name!r} has dtype {dtype!r}, allowed: {', '.join(allowed)}"
        for dtype in dtypes
        if dtype not in allowed
    ]
    if not faults and len(dtypes) > 1:
        faults.append(f"tensor {tensor.name!r} has boxes of dtypes {', '.join(dtypes)}, allowed is one of them")
    return faults


def _misplaced(tensor: Tensor, box: Piece) -> str | None:
    """Return the reason why a box does not fit its tensor. In Python's integers: a hostile number may have any size."""
    offsets, lengths, shape = box.offsets, box.lengths, tensor.shape
    if len(offsets) != len(shape) or len(lengths) != len(shape):
        why = f"has {len(offsets)} and {len(lengths)} axes, allowed are {len(shape)}"
    elif lengths == shape and not any(offsets):
        return None
    elif min(lengths, default=1) < 1:
        why = "has a length below 1"
    else:
        for begin, length, size in zip(offsets, lengths, shape, strict=True):
            if begin < 0 or begin + length > size:
                why = f"is not inside the shape {shape}"
                break
        else:
            return None
    return f"box at {offsets} of lengths {lengths} of tensor {tensor.name!r} {why}"


def _tiling_faults(tensor: Tensor, boxes: list[Piece]) -> list[str]:
    """List overlaps (their number and the first) and missing elements of boxes that all lie inside the tensor."""
    shape = (len(boxes), len(tensor.shape))
    low = np.array([box.offsets for box in boxes], np.int64).reshape(shape)
    high = low + np.array([box.lengths for box in boxes], np.int64).reshape(shape)
    num_overlaps = 0
    first = ""
    for begin in range(0, len(boxes), ROWS_AT_ONCE):
        rows, after = slice(begin, begin + ROWS_AT_ONCE), slice(begin, None)
        meets = np.triu(np.ones((len(low[rows]), len(low[after])), bool), 1)
        for axis in range(shape[1]):
            meets &= low[rows, None, axis] < high[None, after, axis]
            meets &= low[None, after, axis] < high[rows, None, axis]
        num_overlaps += int(meets.sum())
        if not first and num_overlaps:
            i, k = np.unravel_index(int(meets.argmax()), meets.shape)
            first = f"{boxes[begin + int(i)].offsets} and {boxes[begin + int(k)].offsets}"
    if num_overlaps:
        return [
            f"tensor {tensor.name!r} has {count_of(num_overlaps, 'overlapping pair')} of boxes, the first at {first}"
        ]
    missing = tensor.num_elements - sum(box.num_elements for box in boxes)
    return [f"tensor {tensor.name!r} lacks {missing} of {count_of(tensor.num_elements, 'element')}"] if missing else []
