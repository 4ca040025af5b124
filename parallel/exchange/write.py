"""The writing of a rank's part of an update: local - global of the boxes that it owns, block by block.

    shard - box of the version's file  -->  [codec]  -->  bytes of the part, hashed as they are written

The bytes of the pieces follow each other in canonical order. Differences, roundings and refusals are those of
`training.model.parameters.update_of`, so the parts of all ranks together have the values of one process's update.
"""

import hashlib
import os
from collections.abc import Callable, Collection, Iterator, Sequence
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any, BinaryIO

import numpy as np
import torch

from atoll.parallel.exchange.feedback import BoxFeedback
from atoll.parallel.exchange.load import check_shares
from atoll.parallel.exchange.shares import Share
from atoll.task.arrays import ALLOWED
from atoll.task.errors import NotFinite, TaskBroken
from atoll.tensors.box_reader import BoxReader
from atoll.tensors.codecs.chunks import encode_chunks, encoded_bytes
from atoll.tensors.codecs.codec import CHUNK_ELEMENTS, CodecBroken
from atoll.tensors.codecs.names import parse_codec
from atoll.tensors.layout import FLOATS, Piece, pieces_in_order
from atoll.tensors.safetensors_file import NUMPY_DTYPES, parse_header
from atoll.training.model.parameters import integer_difference

CODEC_STREAM = 1
"""The stream of the codec's random numbers, beside that of the training with the same seed."""

BLOCK_ELEMENTS = 4 * CHUNK_ELEMENTS
"""Number of elements of a block, a whole number of a codec's chunks."""


@dataclass(frozen=True, slots=True)
class Encoding:
    """The codec of an update's floats."""

    codec: str = ""
    """The codec's name; empty: none."""
    seed: int = 0
    """The seed of the training."""
    part: int = 0
    """The number of this part: parts draw different numbers."""
    plain: Collection[str] = ()
    """Names of float tensors that are not encoded: buffers, and those beside the model."""
    feedback: BoxFeedback | None = None
    """The residuals of a biased codec; None: what it leaves out is dropped."""

    def takes(self, share: Share) -> bool:
        """Return whether the codec encodes this box: there is a codec, and the box has floats that are not `plain`."""
        return bool(self.codec) and share.piece.dtype in FLOATS and share.name not in self.plain


def write_part(
    mine: Sequence[Share],
    version: Path,
    out: Path,
    encoding: Encoding = Encoding(),
    beside: Sequence["Box"] = (),
) -> tuple[Piece, ...]:
    """Write the file of this rank's part of the update.

    Memory: a few blocks. No communication.

    Args:
        mine: the boxes that this rank owns (`shares.owned`), after the training.
        version: the file from which they were loaded.
        out: the path of the part's file; it is overwritten, and durable on return.
        encoding: the codec.
        beside: further boxes of the part, of tensors beside the model.

    Returns:
        The pieces, in the order of their bytes, with their digests.

    Raises:
        NotFinite: tensors have NaN, infinite or too large values for the codec; the message has their names.
        TaskBroken: an installed package's codec breaks its contract.
        TaskMismatch: the file does not belong to the model.
        ValueError: a difference of two integers does not fit int64.
        OSError: a file cannot be read or written.
    """
    layout, data_start = parse_header(version)
    check_shares(mine, layout, str(version))
    pieces, wrong = [], []
    rng = np.random.default_rng([encoding.seed, CODEC_STREAM, encoding.part])
    with (
        BoxReader(version, layout, data_start, [share.piece for share in mine]) as reader,
        out.open("wb") as file,
        torch.no_grad(),
    ):
        for box in _in_order([*_boxes(mine, reader, encoding), *beside]):
            try:
                pieces.append(box.written(file, rng))
            except NotFinite as fault:
                wrong.append(str(fault))
        file.flush()
        os.fsync(file.fileno())
    if wrong:
        raise NotFinite(*wrong)
    return tuple(pieces)


@dataclass(frozen=True, slots=True)
class Box:
    """One box of an update, whose values are computed block by block."""

    piece: Piece
    """The piece as it is stored, without its digest."""
    blocks: Callable[[], Iterator[np.ndarray[Any, Any]]]
    """() -> local - global, in C order; blocks of `BLOCK_ELEMENTS`, but the last."""

    feedback: BoxFeedback | None = None
    """The residuals of a biased codec."""

    def written(self, file: BinaryIO, rng: np.random.Generator) -> Piece:
        """Write the box to the part's file; return its piece with the digest."""
        digest, start = hashlib.sha256(), 0
        for block in self.blocks():
            if not np.isfinite(block).all():
                raise NotFinite(f"the update has NaN or infinite values in {self.piece.tensor}")
            for data in self._encoded(block, start, rng) if self.piece.codec else (self._plain(block, start),):
                digest.update(data)
                file.write(data)
            start += block.size
        return replace(self.piece, sha256=digest.hexdigest())

    def _plain(self, block: np.ndarray[Any, Any], start: int) -> memoryview:
        if self.feedback is not None:
            block = block + self.feedback.before(self.piece, start, block.size)
        return block.astype(NUMPY_DTYPES[self.piece.dtype], copy=False).data

    def _encoded(self, block: np.ndarray[Any, Any], start: int, rng: np.random.Generator) -> Iterator[bytes]:
        codec = parse_codec(self.piece.codec)
        try:
            if self.feedback is None:
                yield from encode_chunks(codec, block.size, lambda first, stop: block[first:stop], rng)
            else:
                yield from self.feedback.encoded(codec, self.piece, start, block, rng)
        except CodecBroken as fault:
            raise TaskBroken(f"the update cannot be encoded: {fault}") from fault
        except ValueError as fault:
            raise NotFinite(f"the update cannot be encoded: tensor {self.piece.tensor!r}, {fault}") from fault


def _boxes(mine: Sequence[Share], reader: BoxReader, encoding: Encoding) -> list[Box]:
    """Return the boxes of the model, in the order of the shares."""
    codec = parse_codec(encoding.codec) if encoding.codec else None
    found, begin = [], 0
    for share in mine:
        piece, feedback = share.piece, encoding.feedback if encoding.takes(share) else None
        if piece.dtype in FLOATS:
            if codec is not None and encoding.takes(share):
                size = encoded_bytes(codec, piece.num_elements)
                piece = replace(piece, codec=codec.name, encoded_bytes=size) if size < piece.num_bytes else piece
            found.append(Box(piece, partial(differences, share, reader, begin), feedback))
        else:  # their difference decides about the dtype, so about the order
            whole = _integers(share, reader, begin)
            found.append(Box(replace(piece, dtype=ALLOWED[whole.dtype]), partial(iter, [whole])))
        begin += share.piece.num_bytes
    return found


def _in_order(boxes: Sequence[Box]) -> list[Box]:
    """Return the boxes in the canonical order of their pieces."""
    order = {piece: place for place, piece in enumerate(pieces_in_order(box.piece for box in boxes))}
    return sorted(boxes, key=lambda box: order[box.piece])


def differences(share: Share, reader: BoxReader, begin: int) -> Iterator[np.ndarray[Any, Any]]:
    """Yield local - global of a float box, in blocks of `BLOCK_ELEMENTS`: see `parameters.update_of`.

    Args:
        share: the share with the local values.
        reader: the reader of the version; the box is among its boxes.
        begin: the place of the box in the bytes of the reader.
    """
    local, flat = share.local, share.local.reshape(-1)
    exact = torch.promote_types(local.dtype, torch.float32)
    for start in range(0, flat.numel(), BLOCK_ELEMENTS):
        now = flat[start : start + BLOCK_ELEMENTS].to("cpu", exact)
        data = reader.read(begin + 4 * start, begin + 4 * (start + now.numel()))
        before = torch.from_numpy(np.frombuffer(bytearray(data), np.float32)).to(local.dtype).to(exact)
        yield (now - before).to(torch.float32).numpy()


def _integers(share: Share, reader: BoxReader, begin: int) -> np.ndarray[Any, Any]:
    dtype = NUMPY_DTYPES[share.piece.dtype]
    before = np.frombuffer(reader.read(begin, begin + share.piece.num_bytes), dtype)
    now = share.local.reshape(-1).cpu()
    return integer_difference(share.name, (now.to(torch.uint8) if now.dtype == torch.bool else now).numpy(), before)
