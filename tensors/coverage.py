"""The coverage of a model by an update's pieces: each element of every tensor exactly once."""

from array import array
from collections import Counter
from collections.abc import Callable, Iterable, Sequence
from dataclasses import replace

import numpy as np
from numpy.typing import NDArray

from atoll.ground.printable import count_of
from atoll.tensors.layout import FLOATS, Layout, Piece, Tensor, update_dtypes

BOXES_MAX = 1024
"""Largest number of boxes of one tensor: the number of ranks over which a client may shard it."""

ROWS_AT_ONCE = 64
"""Number of boxes that are compared with all later ones at a time: at most 64 x 1,024 comparisons per axis."""


def check_cover(layout: Layout, pieces: Iterable[Piece], *, may_omit: bool = False) -> list[str]:
    """List all faults of an update's pieces; none if they cover the layout.

    A float tensor is sent in the model's dtype or as F32, an integer tensor in the model's; all boxes of a tensor in
    one dtype. A tensor without elements is sent as one box of its full (empty) shape.

    The time is bounded for hostile pieces too: each box of a known tensor is compared with at most `BOXES_MAX` others
    (more boxes are one fault and are not examined), so n pieces cost at most 1,024 n comparisons per axis, in numpy.

    Args:
        layout: the model's tensors.
        pieces: the pieces as the client declares them, untrusted.
        may_omit: allow that whole tensors are missing.

    Returns:
        Faults, each with the tensor, the value and what is allowed.
    """
    boxes, faults = _by_tensor(layout, pieces, _Boxes.keep)
    for tensor in layout:
        if tensor.name in boxes:
            faults += boxes[tensor.name].faults()
        elif not may_omit:
            faults.append(f"tensor {tensor.name!r} is missing: {count_of(tensor.num_elements, 'element')}")
    return faults


def check_inside(layout: Layout, pieces: Sequence[Piece]) -> list[str]:
    """List the faults of single pieces of an update: their tensors, dtypes and positions.

    The time is as in `check_cover`, without the comparisons of boxes.
    """
    if _are_inside(layout, pieces):
        return []
    boxes, faults = _by_tensor(layout, pieces, _Boxes.add)
    for tensor in layout:
        if tensor.name in boxes:
            faults += boxes[tensor.name].faults_inside()
    return faults


def _are_inside(layout: Layout, pieces: Sequence[Piece]) -> bool:
    """Return whether the pieces are without a fault and at most `BOXES_MAX`: the usual case, in one pass."""
    known = {tensor.name: tensor for tensor in layout}
    dtypes: dict[str, str] = {}
    for piece in pieces:
        tensor = known.get(piece.tensor)
        if tensor is None or not _fits(tensor.shape, piece.offsets, piece.lengths):
            return False
        dtype = dtypes.setdefault(piece.tensor, piece.dtype)
        if piece.dtype != dtype or (dtype not in (tensor.dtype, "F32") and _dtype_faults(tensor, {dtype})):
            return False
        if dtype == "F32" and tensor.dtype not in FLOATS:
            return False
    return len(pieces) <= BOXES_MAX or max(Counter(piece.tensor for piece in pieces).values()) <= BOXES_MAX


def check_rows(layout: Layout, pieces: Sequence[Piece]) -> list[str]:
    """List all faults of the pieces of an update whose rows are appended to the model's; none if they fit.

    The update has every tensor of the model, in its dtype and shape except for the number of rows, which may be 0.

    Args:
        layout: the model's tensors, each with a first axis.
        pieces: the pieces as the client declares them, untrusted.

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
    """Return the tensors that an update appends to a model's, with as many rows as its pieces reach."""
    rows: dict[str, int] = {}
    for piece in pieces:
        if piece.offsets and piece.lengths:
            rows[piece.tensor] = max(rows.get(piece.tensor, 0), piece.offsets[0] + piece.lengths[0])
    return tuple(replace(tensor, shape=(rows.get(tensor.name, 0), *tensor.shape[1:])) for tensor in layout)


def _by_tensor(
    layout: Layout, pieces: Iterable[Piece], add: Callable[["_Boxes", Piece], None]
) -> tuple[dict[str, "_Boxes"], list[str]]:
    """Return the boxes of each tensor, and the faults about tensors that the model does not have."""
    known = {tensor.name: tensor for tensor in layout}
    boxes: dict[str, _Boxes] = {}
    unknown: dict[str, None] = {}
    for piece in pieces:
        if (of_tensor := boxes.get(piece.tensor)) is None:
            if piece.tensor not in known:
                unknown[piece.tensor] = None
                continue
            of_tensor = boxes[piece.tensor] = _Boxes(known[piece.tensor])
        add(of_tensor, piece)
    return boxes, [f"tensor {name!r} is not one of the model's {len(known)}" for name in unknown]


class _Boxes:
    """The boxes of one tensor, in 16 bytes for each axis: the pieces of 1,024 parts are never all in memory."""

    __slots__ = ("_count", "_dtypes", "_misplaced", "_numbers", "_tensor")

    def __init__(self, tensor: Tensor) -> None:
        self._tensor, self._count = tensor, 0
        self._dtypes: set[str] = set()
        self._misplaced: list[str] = []
        self._numbers = array("q")  # offsets and lengths of the boxes inside the tensor, box after box

    def keep(self, box: Piece) -> None:
        """Add a box, and keep its place for `faults`."""
        self.add(box)
        if not self._misplaced and self._count <= BOXES_MAX:
            self._numbers.extend((*box.offsets, *box.lengths))

    def add(self, box: Piece) -> None:
        """Add a box; more than `BOXES_MAX` are only counted."""
        self._count += 1
        if self._count > BOXES_MAX:
            return
        self._dtypes.add(box.dtype)
        if fault := _misplaced(self._tensor, box):
            self._misplaced.append(fault)

    def faults_inside(self) -> list[str]:
        """List the faults of the boxes' number, dtypes and places."""
        if self._count > BOXES_MAX:
            of = count_of(self._count, "box", "boxes")
            return [f"tensor {self._tensor.name!r} has {of}, allowed are {BOXES_MAX}"]
        return _dtype_faults(self._tensor, self._dtypes) + self._misplaced

    def faults(self) -> list[str]:
        """List all faults of the boxes of the whole tensor, each of which was kept."""
        faults = self.faults_inside()
        if self._misplaced or self._count > BOXES_MAX:
            return faults
        if self._tensor.num_elements == 0:
            several = f"is empty and has {count_of(self._count, 'box', 'boxes')}, not 1"
            return faults + [f"tensor {self._tensor.name!r} {several}"] * (self._count > 1)
        numbers = np.array(self._numbers, np.int64).reshape(self._count, 2, len(self._tensor.shape))
        return faults + _tiling_faults(self._tensor, numbers[:, 0], numbers[:, 1])


def _dtype_faults(tensor: Tensor, found: set[str]) -> list[str]:
    allowed = sorted({tensor.dtype, "F32"} if tensor.dtype in FLOATS else update_dtypes(tensor.dtype))
    dtypes = sorted(found)
    faults = [
        f"tensor {tensor.name!r} has dtype {dtype!r}, allowed: {', '.join(allowed)}"
        for dtype in dtypes
        if dtype not in allowed
    ]
    if not faults and len(dtypes) > 1:
        faults.append(f"tensor {tensor.name!r} has boxes of dtypes {', '.join(dtypes)}, allowed is one of them")
    return faults


def _misplaced(tensor: Tensor, box: Piece) -> str | None:
    """Return the reason why a box does not fit its tensor."""
    offsets, lengths, shape = box.offsets, box.lengths, tensor.shape
    if _fits(shape, offsets, lengths):
        return None
    if len(offsets) != len(shape) or len(lengths) != len(shape):
        why = f"has {len(offsets)} and {len(lengths)} axes, allowed are {len(shape)}"
    else:
        why = "has a length below 1" if min(lengths) < 1 else f"is not inside the shape {shape}"
    return f"box at {offsets} of lengths {lengths} of tensor {tensor.name!r} {why}"


def _fits(shape: tuple[int, ...], offsets: tuple[int, ...], lengths: tuple[int, ...]) -> bool:
    """Return whether a box lies inside a shape. In Python's integers: a hostile number may have any size."""
    if lengths == shape:
        return not any(offsets) and len(offsets) == len(shape)
    if len(offsets) != len(shape) or len(lengths) != len(shape):
        return False
    for begin, length, size in zip(offsets, lengths, shape, strict=True):
        if begin < 0 or length < 1 or begin + length > size:
            return False
    return True


def _tiling_faults(tensor: Tensor, low: NDArray[np.int64], lengths: NDArray[np.int64]) -> list[str]:
    """List overlaps (their number and the first) and missing elements of boxes that all lie inside the tensor.

    Args:
        tensor: the tensor.
        low: (boxes, axes), their offsets.
        lengths: (boxes, axes), their lengths.
    """
    high, (num_boxes, num_axes) = low + lengths, low.shape
    num_overlaps = 0
    first = ""
    for begin in range(0, num_boxes, ROWS_AT_ONCE):
        rows, after = slice(begin, begin + ROWS_AT_ONCE), slice(begin, None)
        meets = np.triu(np.ones((len(low[rows]), len(low[after])), bool), 1)
        for axis in range(num_axes):
            meets &= low[rows, None, axis] < high[None, after, axis]
            meets &= low[None, after, axis] < high[rows, None, axis]
        num_overlaps += int(meets.sum())
        if not first and num_overlaps:
            pair = np.unravel_index(int(meets.argmax()), meets.shape)
            first = " and ".join(str(tuple(low[begin + int(k)].tolist())) for k in pair)
    if num_overlaps:
        return [
            f"tensor {tensor.name!r} has {count_of(num_overlaps, 'overlapping pair')} of boxes, the first at {first}"
        ]
    missing = tensor.num_elements - int(lengths.prod(axis=1).sum())
    return [f"tensor {tensor.name!r} lacks {missing} of {count_of(tensor.num_elements, 'element')}"] if missing else []
