"""The coverage of a model by an update's pieces: each element of every tensor exactly once."""

from collections.abc import Iterable, Sequence
from dataclasses import replace

import numpy as np

from atoll.aggregation.printable import count_of
from atoll.aggregation.tensors.layout import FLOATS, Layout, Piece, Tensor, update_dtypes

BOXES_MAX = 1024
"""Largest number of boxes of one tensor: the number of ranks over which a client may shard it."""


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
    boxes: dict[str, list[Piece]] = {}
    for piece in pieces:
        boxes.setdefault(piece.tensor, []).append(piece)
    known = {tensor.name for tensor in layout}
    faults = [f"tensor {name!r} is not one of the model's {len(known)}" for name in boxes if name not in known]
    for tensor in layout:
        if tensor.name in boxes:
            faults += _faults_of(tensor, boxes[tensor.name])
        elif not may_omit:
            faults.append(f"tensor {tensor.name!r} is missing: {count_of(tensor.num_elements, 'element')}")
    return faults


def check_rows(layout: Layout, pieces: Sequence[Piece]) -> list[str]:
    """List all faults of the pieces of an update whose rows are appended to the model's; none if they fit.

    The update has every tensor of the model, in its dtype and shape except for the number of rows, which may be 0.

    Args:
        layout: the model's tensors, each with a first axis.
        pieces: as the client declares them, untrusted.

    Returns:
        Faults, as of `check_cover`.
    """
    dtypes = {tensor.name: tensor.dtype for tensor in layout}
    wrong = {
        piece.tensor: f"tensor {piece.tensor!r} has dtype {piece.dtype!r}, allowed: {dtypes[piece.tensor]}"
        for piece in pieces
        if piece.dtype != dtypes.get(piece.tensor, piece.dtype)
    }
    return [*wrong.values()] or check_cover(appended(layout, pieces), pieces)


def appended(layout: Layout, pieces: Iterable[Piece]) -> Layout:
    """Return the tensors that an update appends to those of a model: with as many rows as its pieces reach."""
    rows: dict[str, int] = {}
    for piece in pieces:
        if piece.offsets and piece.lengths:
            rows[piece.tensor] = max(rows.get(piece.tensor, 0), piece.offsets[0] + piece.lengths[0])
    return tuple(replace(tensor, shape=(rows.get(tensor.name, 0), *tensor.shape[1:])) for tensor in layout)


def _faults_of(tensor: Tensor, boxes: list[Piece]) -> list[str]:
    if len(boxes) > BOXES_MAX:
        return [f"tensor {tensor.name!r} has {count_of(len(boxes), 'box', 'boxes')}, allowed are {BOXES_MAX}"]
    faults = _dtype_faults(tensor, boxes)
    misplaced = [fault for box in boxes if (fault := _misplaced(tensor, box))]
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
    where = f"box at {box.offsets} of lengths {box.lengths} of tensor {tensor.name!r}"
    num_axes = len(tensor.shape)
    if len(box.offsets) != num_axes or len(box.lengths) != num_axes:
        return f"{where} has {len(box.offsets)} and {len(box.lengths)} axes, allowed are {num_axes}"
    if box.lengths == tensor.shape and not any(box.offsets):
        return None
    if min(box.lengths, default=1) < 1:
        return f"{where} has a length below 1"
    for offset, length, size in zip(box.offsets, box.lengths, tensor.shape, strict=True):
        if offset < 0 or offset + length > size:
            return f"{where} is not inside the shape {tensor.shape}"
    return None


def _tiling_faults(tensor: Tensor, boxes: list[Piece]) -> list[str]:
    """List overlaps (their number and the first) and missing elements of boxes that all lie inside the tensor."""
    shape = (len(boxes), len(tensor.shape))
    low = np.array([box.offsets for box in boxes], np.int64).reshape(shape)
    high = low + np.array([box.lengths for box in boxes], np.int64).reshape(shape)
    num_overlaps = 0
    first = ""
    for i in range(len(boxes) - 1):
        meets = ((low[i] < high[i + 1 :]) & (low[i + 1 :] < high[i])).all(axis=1)
        num_overlaps += int(meets.sum())
        if not first and num_overlaps:
            first = f"{boxes[i].offsets} and {boxes[i + 1 + int(meets.argmax())].offsets}"
    if num_overlaps:
        return [
            f"tensor {tensor.name!r} has {count_of(num_overlaps, 'overlapping pair')} of boxes, the first at {first}"
        ]
    missing = tensor.num_elements - sum(box.num_elements for box in boxes)
    return [f"tensor {tensor.name!r} lacks {missing} of {count_of(tensor.num_elements, 'element')}"] if missing else []
