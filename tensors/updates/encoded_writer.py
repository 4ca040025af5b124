"""A writer of an update's file whose float tensors are encoded, chunk by chunk: no second copy is ever in memory.

The result is a safetensors file, in which an encoded tensor is bytes (U8). These tensors are not encoded:

    integers                         exact, and small
    the named tensors                such as a running variance, which no rounding may make negative
    tensors that would not shrink    a bias of one element is 4 bytes, with topk 6

The remainder of a biased codec is written to a second file, the next residual (`error_feedback`).
"""

import json
import logging
from collections.abc import Collection, Iterator, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from atoll.tensors.codecs.chunks import encode_chunks, encoded_bytes
from atoll.tensors.codecs.codec import Codec, Values
from atoll.tensors.codecs.error_feedback import feed
from atoll.tensors.layout import Piece, Tensor, in_order
from atoll.tensors.safetensors_file import NUMPY_DTYPES, TensorFileCorrupted, TensorFileWriter
from atoll.tensors.updates.reader import UpdateReader, stored_model

logger = logging.getLogger(__name__)

Arrays = Mapping[str, NDArray[Any]]

REPLACES = "replaces"
"""The key in a residual's header of the list of the files that it replaces, as JSON."""

_DTYPES = {dtype: name for name, dtype in NUMPY_DTYPES.items() if name != "BF16"}


@dataclass(frozen=True, slots=True)
class Feedback:
    """The residual files before and after one update."""

    residuals: Sequence[Path]
    """The residuals to add, usually one: the new one replaces all of them."""
    out: Path
    """The file of the new residual; it becomes valid when the update is accepted."""


def write_encoded(
    path: Path,
    update: Arrays,
    codec: Codec,
    *,
    rng: np.random.Generator,
    plain: Collection[str] = (),
    feedback: Feedback | None = None,
) -> tuple[Piece, ...]:
    """Write an update that is in memory; its file and the residual's appear whole, and are not synced.

    Args:
        path: the path of the file.
        update: float32 and integer arrays by name.
        codec: the codec of the float tensors.
        rng: the only source of randomness: the same update, residual and seed give the same bytes.
        plain: names of float tensors that are not encoded.
        feedback: the residuals of a biased codec; None: no residual is added, and the remainder is dropped.

    Returns:
        One piece per tensor, in canonical order.

    Raises:
        ValueError: a value is beyond the codec's range, or a dtype cannot be exchanged.
    """
    tensors = {name: Tensor(name, _DTYPES[array.dtype], array.shape) for name, array in update.items()}
    encoded = {name: tensor for name, tensor in tensors.items() if name not in plain and _pays(codec, tensor)}
    stored = in_order(_as_bytes(codec, tensor) if name in encoded else tensor for name, tensor in tensors.items())
    with ExitStack() as stack:
        writer = stack.enter_context(TensorFileWriter(path, stored))
        residual = stack.enter_context(_Residual(feedback, encoded.values())) if feedback else None
        for tensor in stored:
            if tensor.name in encoded:
                for data in _chunks(codec, encoded[tensor.name], update[tensor.name], residual, rng):
                    writer.append(np.frombuffer(data, np.uint8))
            elif tensor.num_bytes:
                writer.append(update[tensor.name])
        if residual is not None:
            residual.finish()
        pieces = writer.finish(durable=False)
    return tuple(_encoded_piece(codec, encoded[p.tensor], p) if p.tensor in encoded else p for p in pieces)


def _pays(codec: Codec, tensor: Tensor) -> bool:
    return tensor.dtype == "F32" and encoded_bytes(codec, tensor.num_elements) < tensor.num_bytes


def _as_bytes(codec: Codec, tensor: Tensor) -> Tensor:
    return Tensor(tensor.name, "U8", (encoded_bytes(codec, tensor.num_elements),))


def _encoded_piece(codec: Codec, tensor: Tensor, stored: Piece) -> Piece:
    offsets = (0,) * len(tensor.shape)
    return replace(
        stored,
        dtype=tensor.dtype,
        offsets=offsets,
        lengths=tensor.shape,
        codec=codec.name,
        encoded_bytes=stored.num_bytes,
    )


def _chunks(
    codec: Codec, tensor: Tensor, array: NDArray[Any], residual: "_Residual | None", rng: np.random.Generator
) -> Iterator[bytes]:
    """Yield the encoded chunks of one tensor, each when its part of the residual is written."""
    flat = np.ascontiguousarray(array).reshape(-1)
    if residual is None:
        try:
            yield from encode_chunks(codec, flat.size, lambda start, stop: flat[start:stop], rng)
        except ValueError as fault:
            raise ValueError(f"tensor {tensor.name!r}, {fault}") from fault
        return
    for chunk in feed(codec, [tensor], lambda _, start, stop: flat[start:stop], residual.read, rng):
        residual.append(chunk.residual)
        yield chunk.data


class _Residual:
    """The old residuals, open for reading, and the new one, which grows."""

    def __init__(self, feedback: Feedback, tensors: Collection[Tensor]) -> None:
        self._paths, self._tensors = feedback.residuals, tensors
        self._old: list[tuple[UpdateReader, dict[str, tuple[int, ...]]]] = []
        note = {REPLACES: json.dumps([path.name for path in feedback.residuals])}
        self._stack = ExitStack()
        self._writer = TensorFileWriter(feedback.out, tensors, metadata=note)

    def __enter__(self) -> "_Residual":
        self._stack.enter_context(self._writer)
        for path in self._paths:
            try:
                model = stored_model(path)
            except TensorFileCorrupted as error:
                logger.warning("a residual of error feedback is damaged and is dropped: %s", error)
                continue
            shapes = {piece.tensor: piece.lengths for piece in model.pieces if piece.dtype == "F32"}
            self._old.append((self._stack.enter_context(UpdateReader(model)), shapes))
        return self

    def __exit__(self, *error: Any) -> None:
        self._stack.__exit__(*error)

    def read(self, tensor: Tensor, start: int, stop: int) -> Values:
        """Return the sum of the old residuals, in the order of their files; one of another shape counts as 0."""
        total = np.zeros(stop - start, np.float32)
        for reader, shapes in self._old:
            if shapes.get(tensor.name) == tensor.shape:
                total += reader.read(tensor, start, stop)
        return total

    def append(self, values: Values) -> None:
        """Write the next values of the new residual."""
        self._writer.append(values)

    def finish(self) -> None:
        """Give the file of the new residual its name."""
        self._writer.finish(durable=False)
