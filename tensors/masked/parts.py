"""The encoding of the parts of a mesh client: each rank turns the boxes that it owns into words, as one process would.

    rank r:  plain part  -->  Measured, integers --+                      +-->  encoded part (mask.mask_part masks it)
                                                   +-- all-reduce, gather +
    rank 0:                                        +                      +-->  the same, with secure/exact

The norm is that of all ranks' boxes. The exchange between the ranks is the caller's: `merged` adds what they have
measured in the ranks' order, so that all have one norm, and `assembled` joins the boxes of integer tensors.
"""

import hashlib
import os
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any, BinaryIO

import numpy as np
from numpy.typing import NDArray

from atoll.ground.printable import count_of
from atoll.tensors.layout import FLOATS, Layout, Piece, pieces_in_order
from atoll.tensors.masked.encode import TILE_ELEMENTS, BoxEncoder, Measured, measured
from atoll.tensors.safetensors_file import NUMPY_DTYPES, read_into, to_float32
from atoll.tensors.secure.masked_layout import EXACT, WORD_NAMES, integers_of
from atoll.tensors.secure.plan import EncodingPlan, Vector

Box = tuple[Piece, NDArray[np.int64]]
"""A box of an integer tensor, and its values in C order."""


def measure_part(part: Path, pieces: Sequence[Piece]) -> tuple[Measured, list[Box]]:
    """Return the measure of a plain part's floats, and its boxes of integer tensors.

    Args:
        part: the bytes of the pieces, one after the other.
        pieces: not encoded by a codec.

    Raises:
        NotFinite: a value is NaN or infinite.
        TensorFileCorrupted: the file is shorter.
    """
    with part.open("rb") as file:
        integers = [
            (piece, _values(file, part, piece, position, 0, piece.num_elements).astype(np.int64))
            for piece, position in _positions(pieces)
            if piece.dtype not in FLOATS
        ]
        blocks = (
            (piece.tensor, block)
            for piece, position in _positions(pieces)
            if piece.dtype in FLOATS
            for _, block in _blocks(file, part, piece, position)
        )
        return measured(blocks), integers


def assembled(layout: Layout, boxes: Iterable[Box]) -> dict[str, NDArray[np.int64]]:
    """Return the integer tensors of a layout, from the boxes of all ranks, which cover each element once.

    Raises:
        ValueError: they do not, or are of another tensor.
    """
    tensors = {tensor.name: tensor for tensor in integers_of(layout)}
    found = {name: np.zeros(tensor.shape, np.int64) for name, tensor in tensors.items()}
    left = {name: tensor.num_elements for name, tensor in tensors.items()}
    for piece, values in boxes:
        if piece.tensor not in tensors:
            raise ValueError(f"{piece.tensor!r} is not one of the {count_of(len(tensors), 'integer tensor')}")
        at = tuple(slice(o, o + n) for o, n in zip(piece.offsets, piece.lengths, strict=True))
        found[piece.tensor][at] = values.reshape(piece.lengths)
        left[piece.tensor] -= piece.num_elements
    if wrong := [name for name, count in left.items() if count]:
        raise ValueError(f"the boxes of {', '.join(wrong[:5])} do not cover it once")
    return found


def encode_part(
    part: Path,
    out: Path,
    pieces: Sequence[Piece],
    *,
    vector: Vector,
    plan: EncodingPlan,
    norm: float,
    rounding: bytes,
    exact: NDArray[np.int64] | None = None,
) -> tuple[Piece, ...]:
    """Encode the float boxes of a plain part; the encoded part is durable on return.

    Args:
        part: the bytes of the pieces, one after the other.
        out: of the words of the boxes, in canonical order; overwritten.
        pieces: of the plain part.
        vector: of the sum.
        plan: of this member.
        norm: of the whole update (`merged`).
        rounding: as of `BoxEncoder`, the same at each rank.
        exact: the words of `secure/exact` (`encode.exact_words`), at the one rank that adds them.

    Returns:
        The pieces of the encoded part with their digests, in the order of their bytes.

    Raises:
        NotFinite: a value is NaN or infinite.
        TensorFileCorrupted: the plain part is shorter.
        OSError: a file cannot be read or written.
    """
    positions, factor = dict(_positions(pieces)), plan.factor(plan.weight, norm, vector.num_values)
    dtype = WORD_NAMES[plan.bits]
    sources = {replace(p, dtype=dtype, sha256=""): p for p in pieces if p.dtype in FLOATS}
    wanted = [*sources]
    if exact is not None:
        wanted.append(Piece(EXACT, "I64", (0,), exact.shape, ""))
    found = []
    with part.open("rb") as source, out.open("wb") as file:
        for piece in pieces_in_order(wanted):
            blocks: Iterator[NDArray[Any]]
            if piece.tensor == EXACT:
                assert exact is not None
                blocks = iter([exact])
            else:
                encoder, plain = BoxEncoder(vector, plan, piece, factor, rounding), sources[piece]
                blocks = (
                    encoder.words(block, first) for first, block in _blocks(source, part, plain, positions[plain])
                )
            digest = hashlib.sha256()
            for words in blocks:
                digest.update(words.data)
                file.write(words.data)
            found.append(replace(piece, sha256=digest.hexdigest()))
        file.flush()
        os.fsync(file.fileno())
    return tuple(found)


def _positions(pieces: Iterable[Piece]) -> Iterator[tuple[Piece, int]]:
    position = 0
    for piece in pieces:
        yield piece, position
        position += piece.num_bytes


def _blocks(file: BinaryIO, path: Path, piece: Piece, position: int) -> Iterator[tuple[int, NDArray[Any]]]:
    for first in range(0, piece.num_elements, TILE_ELEMENTS):
        last = min(first + TILE_ELEMENTS, piece.num_elements)
        yield first, to_float32(_values(file, path, piece, position, first, last), piece.dtype)


def _values(file: BinaryIO, path: Path, piece: Piece, position: int, first: int, last: int) -> NDArray[Any]:
    values = np.empty(last - first, NUMPY_DTYPES[piece.dtype])
    read_into(values, file.fileno(), position + first * values.itemsize, path=path)
    return values
