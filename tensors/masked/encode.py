"""The encoding of an update as words, file to file, in two passes: its norm, then its words.

    update (local - global)  -->  norm, magnitudes  -->  x C / max(norm, C), x a, / step, rounded  -->  encoded file

The update is clipped as a whole: one factor for all float tensors, so that its direction stays. Values are rounded up
or down at random, with secret numbers that belong to positions: a rank of a mesh rounds its boxes as one process does.
In a private sum they are rounded to the nearest, and the encoded file has no noise: `mask` adds it at each attempt.
Memory is a few tiles.

An encoded file is on its site's disk alone; what is sent is its masked form (`mask`).
"""

import math
import os
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from atoll.ground.faults import Refused
from atoll.tensors.layout import FLOATS, Layout, Piece, Tensor, in_order
from atoll.tensors.safetensors_file import NUMPY_DTYPES, TensorFileWriter
from atoll.tensors.secure.exact import encode_exact, fault_of_metric
from atoll.tensors.secure.keystream import Words, add_stream, add_streams_at
from atoll.tensors.secure.masked_layout import EXACT, MetricShape, integers_of
from atoll.tensors.secure.plan import EncodingPlan, Vector
from atoll.tensors.secure.positions import is_whole, runs_between
from atoll.tensors.secure.vector import Fill, encode, fill_of
from atoll.tensors.updates.reader import UpdateReader, stored_model

TILE_ELEMENTS = 1 << 18
"""Number of elements that are encoded at once."""
KEY_BYTES = 32

Read = Callable[[Tensor, int, int], NDArray[Any]]
"""(tensor, start, stop) -> these elements of a tensor of an update, in flat order."""


class NotFinite(Refused):
    """An update with NaN or infinite values; the message names the tensors."""


class Measured(NamedTuple):
    """The first pass over an update, or over the boxes of one rank; `merged` adds those of all ranks.

    Attributes:
        squares: the sum of the squares of all floats.
        magnitudes: the largest |value| of each float tensor, by name.
    """

    squares: float
    magnitudes: Mapping[str, float]

    @property
    def norm(self) -> float:
        """The Euclidean norm."""
        return math.sqrt(self.squares)


class Encoded(NamedTuple):
    """The encoding of an update.

    Attributes:
        pieces: of the encoded file, in canonical order.
        norm: of the update before it was clipped.
        factor: by which its floats were multiplied: the weight times the clip's factor.
        left_out: sentences about the metrics whose sums are not in the words.
    """

    pieces: tuple[Piece, ...]
    norm: float
    factor: float
    left_out: tuple[str, ...]


def measured(blocks: Iterator[tuple[str, NDArray[Any]]]) -> Measured:
    """Return the squares and magnitudes of named blocks of float tensors.

    Raises:
        NotFinite: a value is NaN or infinite.
    """
    squares: list[float] = []
    magnitudes: dict[str, float] = {}
    wrong: dict[str, None] = {}
    for name, block in blocks:
        squares.append(float(np.square(block, dtype=np.float64).sum()))  # by no threads of a library
        largest = max(float(block.max(initial=0.0)), -float(block.min(initial=0.0)))
        magnitudes[name] = max(magnitudes.get(name, 0.0), largest)
        if not math.isfinite(squares[-1]):
            wrong[name] = None
    if wrong:
        raise NotFinite(f"the update has NaN or infinite values in {', '.join(list(wrong)[:20])}")
    return Measured(math.fsum(squares), magnitudes)


def merged(parts: Sequence[Measured]) -> Measured:
    """Return the measure of a whole update, from those of the ranks' boxes."""
    magnitudes: dict[str, float] = {}
    for part in parts:
        for name, magnitude in part.magnitudes.items():
            magnitudes[name] = max(magnitudes.get(name, 0.0), magnitude)
    return Measured(math.fsum(part.squares for part in parts), magnitudes)


def exact_words(
    vector: Vector, plan: EncodingPlan, found: Measured, integers: Mapping[str, NDArray[np.int64]]
) -> NDArray[np.int64]:
    """Return the words of `secure/exact`, as they are stored.

    Args:
        vector: of the sum.
        plan: of this member.
        found: of the whole update.
        integers: the values of the integer tensors.
    """
    factor = plan.factor(plan.weight, found.norm, vector.num_values)
    fills = [
        fill_of(found.magnitudes.get(tensor.name, 0.0), factor, plan.bits, vector.ranges[tensor.name])
        for tensor in vector.floats
    ]
    if plan.is_private:  # counts would be released without noise
        fills = [Fill(0, 0.0)] * len(fills)
    return encode_exact(
        vector.exact,
        weight=plan.weight,
        is_within=found.norm <= plan.clip_norm and not plan.is_private,
        fills=fills,
        integers=integers,
        statistics=plan.statistics,
    ).view(np.int64)


def left_out_of(plan: EncodingPlan) -> tuple[str, ...]:
    """Return a sentence for each metric of this member whose sums are not in the words."""
    shapes = {name: MetricShape(name, length) for name, length in plan.metrics}
    found = []
    for name, sums in plan.statistics.items():
        if name not in shapes:
            found.append(f"metric {name!r} is not in the terms of the sum")
        elif fault := fault_of_metric(shapes[name], sums):
            found.append(fault)
    return tuple(found)


class BoxEncoder:
    """The words of a box of a float tensor, block by block.

    Args:
        vector: of the sum.
        plan: of this member.
        box: of a tensor; a whole tensor is one box.
        factor: of the values (`Encoding.factor`).
        rounding: secret key of the numbers that decide between up and down, the same for all boxes of an update and
            of no other update.
    """

    def __init__(self, vector: Vector, plan: EncodingPlan, box: Piece, factor: float, rounding: bytes) -> None:
        self._tensor = next(tensor for tensor in vector.floats if tensor.name == box.tensor)
        self._box, self._start = box, vector.starts[box.tensor]
        self._range, self._factor, self._plan, self._rounding = vector.ranges[box.tensor], factor, plan, rounding
        self._is_whole = is_whole(box, self._tensor.shape)
        self._words = NUMPY_DTYPES["I32" if plan.bits == 32 else "I64"]

    def words(self, values: NDArray[Any], first: int) -> NDArray[Any]:
        """Return the words of some elements of the box, as they are stored.

        Args:
            values: floats.
            first: the first of the elements, in the C order of the box.

        Raises:
            NotFinite: a value is NaN or infinite.
        """
        uniforms = None
        if self._plan.rounds_at_random:
            uniforms = np.zeros(values.size, np.uint32)
            self._add([(self._rounding, 1)], uniforms, first)
        plan = self._plan
        try:
            words, _ = encode(values.reshape(-1), self._factor, plan.bits, self._range, uniforms, plan.most)
        except ValueError as fault:
            raise NotFinite(f"the update has NaN or infinite values in {self._box.tensor}") from fault
        return words.view(self._words)

    def _add(self, streams: Sequence[tuple[bytes, int]], words: Words, first: int) -> None:
        # The dtype of the box does not matter: a position is a number of words.
        runs = runs_between(self._box, self._tensor.shape, self._start, first, first + words.size)
        if self._is_whole:
            ((key, sign),) = streams
            add_stream(words, key, sign, int(runs[0, 0]) if len(runs) else 0)
        else:
            add_streams_at(words, streams, runs)


def encode_update(
    update: Path, out: Path, *, layout: Layout, plan: EncodingPlan, rounding: bytes | None = None
) -> Encoded:
    """Encode the file of an update; the encoded file appears whole, and is not synced.

    Args:
        update: safetensors file of local - global; all tensors of the layout.
        out: safetensors file of the words.
        layout: of the base version's tensors that travel.
        plan: of this member.
        rounding: as of `BoxEncoder`; None: a new key of the operating system.

    Raises:
        NotFinite: a value is NaN or infinite; nothing is written.
        ValueError: the update has other tensors than the layout.
        TensorFileCorrupted: the update's file is damaged.
        OSError: a file cannot be read or written.
    """
    vector = Vector(layout, plan)
    stored = stored_model(update)
    _check_tensors(layout, stored.pieces)
    with ExitStack() as stack:
        reader = stack.enter_context(UpdateReader(stored))
        found = encoded_blocks(reader.read, vector, plan, rounding)
        writer = stack.enter_context(TensorFileWriter(out, vector.masked))
        for words in found.blocks:
            writer.append(words)
        pieces = writer.finish(durable=False)
    return Encoded(pieces, found.norm, found.factor, left_out_of(plan))


class EncodedBlocks(NamedTuple):
    """The encoding of an update, block by block.

    Attributes:
        norm: of the update before it was clipped.
        factor: by which its floats are multiplied: the weight times the clip's factor.
        blocks: the words of all tensors of the masked layout, in canonical order.
    """

    norm: float
    factor: float
    blocks: Iterator[NDArray[Any]]


def encoded_blocks(read: Read, vector: Vector, plan: EncodingPlan, rounding: bytes | None = None) -> EncodedBlocks:
    """Measure an update, and return its words, which are encoded as they are taken.

    Args:
        read: returns some elements of a tensor of the update.
        vector: of the sum.
        plan: of this member.
        rounding: as of `BoxEncoder`; None: a new key of the operating system.

    Raises:
        NotFinite: a value is NaN or infinite.
    """
    found = measured((tensor.name, block) for tensor in vector.floats for _, block in _blocks(read, tensor))
    factor = plan.factor(plan.weight, found.norm, vector.num_values)
    integers = {t.name: read(t, 0, t.num_elements) for t in integers_of(vector.layout)}
    exact = exact_words(vector, plan, found, integers)
    return EncodedBlocks(
        found.norm, factor, _words(read, vector, plan, factor, rounding or os.urandom(KEY_BYTES), exact)
    )


def _words(
    read: Read, vector: Vector, plan: EncodingPlan, factor: float, rounding: bytes, exact: NDArray[np.int64]
) -> Iterator[NDArray[Any]]:
    by_name = {tensor.name: tensor for tensor in vector.floats}
    for tensor in in_order(vector.masked):
        if tensor.name == EXACT:
            yield exact
            continue
        box = Piece(tensor.name, tensor.dtype, (0,) * len(tensor.shape), tensor.shape, "")
        encoder = BoxEncoder(vector, plan, box, factor, rounding)
        for first, block in _blocks(read, by_name[tensor.name]):
            yield encoder.words(block, first)


def _blocks(read: Read, tensor: Tensor) -> Iterator[tuple[int, NDArray[Any]]]:
    """Yield the blocks of a float tensor with their first elements."""
    for start in range(0, tensor.num_elements, TILE_ELEMENTS):
        yield start, read(tensor, start, min(start + TILE_ELEMENTS, tensor.num_elements))


def _check_tensors(layout: Layout, pieces: Sequence[Piece]) -> None:
    found = {piece.tensor: piece for piece in pieces}
    for tensor in layout:
        piece = found.pop(tensor.name, None)
        if piece is None or piece.lengths != tensor.shape or (piece.dtype in FLOATS) != (tensor.dtype in FLOATS):
            is_there = "is missing" if piece is None else f"is {piece.dtype} {piece.lengths}"
            raise ValueError(f"tensor {tensor.name!r} {is_there}; a secure sum takes {tensor.dtype} {tensor.shape}")
    if found:
        raise ValueError(f"tensor {next(iter(found))!r} is not one of the {len(layout)} of the base version")
