"""A client whose updates come in parts: it divides the update of a one-process client into the boxes of several ranks.

    ATOLL_BENCH_DIVIDE=rows:4 python -m benchmarks.dividing agent TASK --site north ...

    rows       each tensor's first axis over the ranks, as FSDP shards it; uneven where it does not divide
    stripes    each tensor's last axis, as tensor parallelism shards a row-parallel weight
    grid       both, over ranks of two axes
    tensors    whole tensors in turn, as a pipeline's stages have them

A tensor with fewer rows than ranks has no box at some of them, and a scalar belongs to one rank. The values stay as
they are, encoded ones are encoded again, box by box: the next version must have the bits that the whole update gives.
"""

import dataclasses
import hashlib
import itertools
import math
import os
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from atoll.cli.main import run
from atoll.client import process
from atoll.client.session.events import Sums
from atoll.client.work.runner import EvaluateOrder, Runner, Training, TrainOrder
from atoll.client.work.worker import WorkerRunner
from atoll.tensors.codecs.chunks import encode_chunks, encoded_bytes
from atoll.tensors.codecs.names import parse_codec
from atoll.tensors.layout import Piece, Tensor, pieces_in_order
from atoll.tensors.pieces import part_name
from atoll.tensors.safetensors_file import NUMPY_DTYPES, parse_header
from atoll.tensors.updates.reader import StoredUpdate, UpdateReader

VARIABLE = "ATOLL_BENCH_DIVIDE"
"""The environment variable with the kind and the number of parts, such as `rows:4`."""

KINDS = ("rows", "stripes", "grid", "tensors")

Box = tuple[tuple[int, ...], tuple[int, ...]]
"""The offsets and the lengths of a box of a tensor."""


def boxes_of(shape: tuple[int, ...], kind: str, num_parts: int, number: int) -> list[list[Box]]:
    """Return the boxes of a tensor that each part has.

    Args:
        shape: of the tensor.
        kind: one of KINDS.
        num_parts: the number of parts.
        number: the tensor's number, which gives those that are not cut their turn.
    """
    whole: Box = ((0,) * len(shape), shape)
    parts: list[list[Box]] = [[] for _ in range(num_parts)]
    if kind == "tensors" or not shape or math.prod(shape) == 0:
        parts[number % num_parts].append(whole)
        return parts
    across = max(d for d in range(1, math.isqrt(num_parts) + 1) if num_parts % d == 0) if kind == "grid" else 1
    cuts = {"rows": {0: num_parts}, "stripes": {-1: num_parts}, "grid": {0: num_parts // across, -1: across}}[kind]
    boxes = [whole]
    for axis, count in cuts.items():
        boxes = [box for each in boxes for box in _cut(each, axis % len(shape), count)]
    for index, (offsets, lengths) in enumerate(boxes):
        if all(lengths):
            parts[index % num_parts].append((offsets, lengths))
    return parts


def _cut(box: Box, axis: int, count: int) -> Iterator[Box]:
    offsets, lengths = box
    bounds = [round(lengths[axis] * k / count) for k in range(count + 1)]
    for begin, end in itertools.pairwise(bounds):
        yield (
            (*offsets[:axis], offsets[axis] + begin, *offsets[axis + 1 :]),
            (*lengths[:axis], end - begin, *lengths[axis + 1 :]),
        )


def divide(update: StoredUpdate, kind: str, num_parts: int) -> list[tuple[tuple[Piece, ...], bytes]]:
    """Divide an update that has a piece for each tensor; return the pieces of each part and their bytes.

    Args:
        update: the update; its values are read one tensor at a time.
        kind: one of KINDS.
        num_parts: the number of parts.
    """
    found: list[dict[Piece, bytes]] = [{} for _ in range(num_parts)]
    with UpdateReader(update) as reader:
        for number, piece in enumerate(update.pieces):
            values = _values(reader, piece)
            for of_part, boxes in zip(found, boxes_of(piece.lengths, kind, num_parts, number), strict=True):
                for offsets, lengths in boxes:
                    index = tuple(slice(o, o + n) for o, n in zip(offsets, lengths, strict=True))
                    box, raw = _encoded(piece, (offsets, lengths), np.ascontiguousarray(values[index]))
                    of_part[box] = raw
    ordered = [pieces_in_order(of_part) for of_part in found]
    return [(pieces, b"".join(of_part[p] for p in pieces)) for pieces, of_part in zip(ordered, found, strict=True)]


def _values(reader: UpdateReader, piece: Piece) -> NDArray[Any]:
    """Return the values of a whole tensor: as they are stored, or decoded."""
    tensor = Tensor(piece.tensor, piece.dtype, piece.lengths)
    out = None if piece.codec else np.empty(tensor.num_elements, NUMPY_DTYPES[piece.dtype])
    return reader.read(tensor, 0, tensor.num_elements, out).reshape(piece.lengths)


def _encoded(piece: Piece, box: Box, values: NDArray[Any]) -> tuple[Piece, bytes]:
    if piece.codec:
        flat, codec = values.reshape(-1), parse_codec(piece.codec)
        chunks = encode_chunks(codec, flat.size, lambda begin, end: flat[begin:end], np.random.default_rng(0))
        raw, size = b"".join(chunks), encoded_bytes(codec, flat.size)
    else:
        raw, size = values.tobytes(), 0
    sha256 = hashlib.sha256(raw).hexdigest()
    return Piece(piece.tensor, piece.dtype, *box, sha256, piece.codec, size), raw


class DividingRunner:
    """A runner whose updates are those of another one, in parts."""

    def __init__(self, runner: Runner, kind: str, num_parts: int) -> None:
        self._runner, self._kind, self._num_parts = runner, kind, num_parts

    async def describe(self) -> int:
        """Describe the data; see `Runner`."""
        return await self._runner.describe()

    async def train(self, order: TrainOrder) -> Training:
        """Train, and divide the update into parts in the folder `order.out`; see `Runner`."""
        whole = order.out.with_name("whole.safetensors")
        training = await self._runner.train(dataclasses.replace(order, out=whole))
        try:
            parts = divide(_stored(whole, training.pieces), self._kind, self._num_parts)
        finally:
            whole.unlink()
        order.out.mkdir()
        for index, (_, raw) in enumerate(parts):
            (order.out / part_name(index)).write_bytes(raw)
        return dataclasses.replace(training, pieces=(), parts=tuple(pieces for pieces, _ in parts))

    async def evaluate(self, order: EvaluateOrder) -> Sums | None:
        """Evaluate; see `Runner`."""
        return await self._runner.evaluate(order)

    def extend(self, budget: float) -> None:
        """Extend the budget; see `Runner`."""
        self._runner.extend(budget)

    def stop(self) -> None:
        """Stop the job; see `Runner`."""
        self._runner.stop()

    def kill(self) -> None:
        """Kill the job; see `Runner`."""
        self._runner.kill()

    def run_ended(self, run_id: str) -> None:
        """Take note of a run's end; see `Runner`."""
        self._runner.run_ended(run_id)

    async def close(self) -> None:
        """Close the runner; see `Runner`."""
        await self._runner.close()


def main() -> None:
    """Run the `atoll` command with an agent whose updates come in parts."""
    kind, _, num_parts = os.environ[VARIABLE].partition(":")

    def divided(*arguments: Any, **settings: Any) -> DividingRunner:
        return DividingRunner(WorkerRunner(*arguments, **settings), kind, int(num_parts))

    process.WorkerRunner = divided  # type: ignore[assignment,misc]
    run()


def _stored(path: Path, pieces: Sequence[Piece]) -> StoredUpdate:
    return StoredUpdate(path, tuple(pieces), data_start=parse_header(path)[1])


if __name__ == "__main__":
    main()
