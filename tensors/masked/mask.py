"""The masking of encoded updates, file to file: each word plus the key streams at its position, modulo 2^bits.

    encoded file, or part of a mesh rank  -->  + S(key 1) - S(key 2) ...  -->  masked file, or part: what is sent

In a sum to which the members add noise each word of a float also gets this member's share, which belongs to the element
and to the attempt. The bytes depend on the encoded words, the streams, the share's key and the layout alone: a masking
that is repeated gives the same file, and the parts of a mesh are the boxes of the file of one process. Memory is a few
tiles.
"""

import hashlib
import os
from collections.abc import Iterable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from atoll.tensors.layout import Layout, Piece, in_order
from atoll.tensors.noise.grid_noise import GridNoise
from atoll.tensors.safetensors_file import NUMPY_DTYPES, TensorFileCorrupted, TensorFileWriter, parse_header, read_into
from atoll.tensors.secure.keystream import Stream, Streams, add_streams_at
from atoll.tensors.secure.masked_layout import EXACT
from atoll.tensors.secure.positions import is_whole, runs_between, starts_of

TILE_ELEMENTS = 1 << 18
"""Number of words that are masked at once."""


def mask_update(
    encoded: Path,
    out: Path,
    layout: Layout,
    streams: Iterable[Stream],
    *,
    start: int | None = None,
    share: GridNoise | None = None,
) -> list[Piece]:
    """Mask an encoded file; the masked file appears whole, and is not synced.

    Args:
        encoded: safetensors file of `encode.encode_update`.
        out: safetensors file of the same tensors.
        layout: of the masked update (`masked_layout`), in its order.
        streams: of the session, with their signs.
        start: first byte of the tensors, in canonical order, of a file with more than them; None: by its header.
        share: of this member in the noise of the sum; None: it adds none.

    Returns:
        The pieces, in canonical order.

    Raises:
        ValueError: the encoded file has other tensors.
        TensorFileCorrupted: the encoded file is damaged.
        OSError: a file cannot be read or written.
    """
    found, position = parse_header(encoded) if start is None else (in_order(layout), start)
    if found != in_order(layout):
        raise ValueError(f"{encoded}: its tensors are not those of the session's sum")
    starts, masks = starts_of(layout), Streams(streams)
    with encoded.open("rb") as source, TensorFileWriter(out, layout) as writer:
        for tensor in found:
            for at in range(0, tensor.num_elements, TILE_ELEMENTS):
                words = _read(
                    source.fileno(), position, tensor.dtype, min(TILE_ELEMENTS, tensor.num_elements - at), encoded
                )
                if share is not None and tensor.name != EXACT:
                    _add(words, share.between(tensor.name, tensor.num_elements, at, at + words.size))
                masks.add(_unsigned(words), starts[tensor.name] + at)
                writer.append(words)
                position += words.nbytes
        return list(writer.finish(durable=False))


def mask_part(
    encoded: Path,
    out: Path,
    layout: Layout,
    pieces: Sequence[Piece],
    streams: Sequence[Stream],
    share: GridNoise | None = None,
) -> list[Piece]:
    """Mask a part of an encoded update: the boxes of a rank of a mesh; durable on return.

    Args:
        encoded: the bytes of the pieces, one after the other.
        out: file of the masked part; overwritten.
        layout: of the masked update.
        pieces: of the part, in the order of their bytes.
        streams: of the session, with their signs.
        share: of this member in the noise of the sum, the same for all parts; None: it adds none.

    Returns:
        The pieces with the digests of the masked bytes.

    Raises:
        ValueError: a piece is of no tensor of the layout.
        TensorFileCorrupted: the file is shorter, or its bytes are not those that were encoded.
        OSError: a file cannot be read or written.
    """
    tensors, starts, masks, result, position = {t.name: t for t in layout}, starts_of(layout), Streams(streams), [], 0
    with encoded.open("rb") as source, out.open("wb") as file:
        for piece in pieces:
            tensor = tensors.get(piece.tensor)
            if tensor is None or tensor.dtype != piece.dtype:
                raise ValueError(f"{encoded}: {piece.dtype} {piece.tensor!r} is not a tensor of the session's sum")
            is_run, before, after = is_whole(piece, tensor.shape), hashlib.sha256(), hashlib.sha256()
            for at in range(0, piece.num_elements, TILE_ELEMENTS):
                stop = min(at + TILE_ELEMENTS, piece.num_elements)
                words = _read(source.fileno(), position, piece.dtype, stop - at, encoded)
                before.update(words.data)
                runs = runs_between(piece, tensor.shape, starts[piece.tensor], at, stop)
                if share is not None and tensor.name != EXACT:
                    elements = runs - (starts[tensor.name], 0)
                    _add(words, share.at(tensor.name, tensor.num_elements, elements))
                if is_run:
                    masks.add(_unsigned(words), int(runs[0, 0]))
                else:
                    add_streams_at(_unsigned(words), streams, runs)
                after.update(words.data)
                file.write(words.data)
                position += words.nbytes
            if piece.sha256 and before.hexdigest() != piece.sha256:
                raise TensorFileCorrupted(f"{encoded}: {piece.tensor!r} is not as it was encoded")
            result.append(replace(piece, sha256=after.hexdigest()))
        file.flush()
        os.fsync(file.fileno())
    return result


def _read(source: int, position: int, dtype: str, count: int, path: Path) -> NDArray[Any]:
    words = np.empty(count, NUMPY_DTYPES[dtype])
    read_into(words, source, position, path=path)
    return words


def _add(words: NDArray[Any], noise: NDArray[np.int64]) -> None:
    """Add noise to words in place, modulo 2^bits."""
    words += noise.astype(words.dtype)


def _unsigned(words: NDArray[Any]) -> NDArray[Any]:
    return words.view(np.dtype(f"u{words.itemsize}"))
