"""Error feedback on a mesh: each rank adds the old residuals of its boxes, and stores the new ones.

Residuals lie in files of whole tensors, as one process has them (`tensors/codecs/error_feedback`), so that the mesh
may change between rounds. A box that stays plain, because its codec would not make it smaller, takes the residual of
its elements along, and leaves none.
"""

import json
import logging
from collections.abc import Iterator, Sequence
from contextlib import ExitStack
from itertools import accumulate
from pathlib import Path
from typing import Any, Self

import numpy as np
from numpy.typing import NDArray

from atoll.tensors.box_reader import BoxReader
from atoll.tensors.codecs.chunks import chunk_bounds
from atoll.tensors.codecs.codec import Codec
from atoll.tensors.codecs.error_feedback import encode_with_feedback
from atoll.tensors.layout import Piece, Tensor
from atoll.tensors.safetensors_file import TensorFileCorrupted, parse_header
from atoll.tensors.shared_file import BoxWriter, make_shared
from atoll.tensors.updates.encoded_writer import REPLACES

logger = logging.getLogger(__name__)

Values = NDArray[np.float32]


def make_residual(out: Path, tensors: Sequence[Tensor], replaced: Sequence[Path]) -> None:
    """Make the file of the new residual, zeros; one process calls it.

    Args:
        out: the file.
        tensors: the tensors of the model, float and not plain.
        replaced: the files of the old residuals.
    """
    make_shared(out, tensors, {REPLACES: json.dumps([path.name for path in replaced])})


class BoxFeedback:
    """The residuals of the boxes of one rank.

    Args:
        residuals: files of the old ones.
        out: the file of the new one (`make_residual`).
        boxes: the boxes of this rank, float and not plain, of float32.
    """

    def __init__(self, residuals: Sequence[Path], out: Path, boxes: Sequence[Piece]) -> None:
        self._residuals, self._boxes = residuals, {(box.tensor, box.offsets): box for box in boxes}
        self._stack, self._out = ExitStack(), BoxWriter(out)
        self._old: list[tuple[BoxReader, dict[tuple[str, tuple[int, ...]], int]]] = []

    def __enter__(self) -> Self:
        self._stack.enter_context(self._out)
        for path in self._residuals:
            try:
                layout, data_start = parse_header(path)
            except TensorFileCorrupted as error:
                logger.warning("a residual of error feedback is damaged and is dropped: %s", error)
                continue
            shapes = {tensor.name: tensor.shape for tensor in layout if tensor.dtype == "F32"}
            boxes = [box for box in self._boxes.values() if _fits(box, shapes.get(box.tensor))]
            begins = accumulate((box.num_bytes for box in boxes), initial=0)
            reader = self._stack.enter_context(BoxReader(path, layout, data_start, boxes))
            self._old.append((reader, dict(zip([(b.tensor, b.offsets) for b in boxes], begins, strict=False))))
        return self

    def __exit__(self, *error: Any) -> None:
        self._stack.__exit__(*error)

    def before(self, piece: Piece, start: int, size: int) -> Values:
        """Return the sum of the old residuals of some elements of a box, in the order of their files."""
        total = np.zeros(size, np.float32)
        for reader, begins in self._old:
            if (begin := begins.get((piece.tensor, piece.offsets))) is not None:
                total += np.frombuffer(reader.read(begin + 4 * start, begin + 4 * (start + size)), np.float32)
        return total

    def encoded(
        self, codec: Codec, piece: Piece, start: int, block: Values, rng: np.random.Generator
    ) -> Iterator[bytes]:
        """Yield the encoded chunks of some elements of a box, and store their remainder as the new residual.

        Args:
            codec: a biased one.
            piece: the box.
            start: the place of the first element in it, a whole number of chunks.
            block: local - global.
            rng: the random generator of the codec.

        Raises:
            ValueError: a chunk cannot be encoded.
            CodecBroken: the codec refuses what it has written.
        """
        before, box = self.before(piece, start, block.size), self._boxes[piece.tensor, piece.offsets]
        for first, stop in chunk_bounds(block.size):
            data, after = encode_with_feedback(codec, block[first:stop], before[first:stop], rng)
            self._out.write(box, start + first, after)
            yield data


def _fits(box: Piece, shape: tuple[int, ...] | None) -> bool:
    """Return whether a box lies in a tensor of this shape."""
    if shape is None or len(shape) != len(box.offsets):
        return False
    return all(o + n <= size for o, n, size in zip(box.offsets, box.lengths, shape, strict=True))
