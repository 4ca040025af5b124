"""The files that a worker leaves: version 0 of a task's model, and the update of one training, plain or encoded."""

import json
from collections.abc import Collection, Sequence
from pathlib import Path

import numpy as np

from atoll.aggregation.codecs.names import parse_codec
from atoll.aggregation.tensors import safetensors_file
from atoll.aggregation.tensors.layout import CONTROL, Piece
from atoll.aggregation.tensors.pieces import piece_bytes_of
from atoll.aggregation.updates.encoded_writer import Feedback, write_encoded
from atoll.parallel.task.arrays import Arrays, layout_of
from atoll.parallel.task.errors import NotFinite
from atoll.parallel.worker.bench import Bench

CODEC_STREAM = 1
"""Beside the seed of the training: the codec's own random numbers."""


def write_initial(out: Path, bench: Bench, seed: int) -> tuple[Piece, ...]:
    """Version 0, with a note of the tensors that no optimizer trains; raises as `Bench.initial`."""
    arrays, buffers = bench.initial(seed), bench.buffers()
    metadata = {safetensors_file.BUFFERS: json.dumps(buffers)} if buffers else None
    return safetensors_file.write(out, arrays, metadata=metadata, piece_bytes=piece_bytes_of(layout_of(arrays)))


def write_update(
    out: Path,
    update: Arrays,
    *,
    codec: str,
    seed: int,
    buffers: Collection[str],
    owed: Sequence[Path] = (),
    residual: Path | None = None,
) -> tuple[Piece, ...]:
    """The file of an update; whoever spools it makes it durable.

    Args:
        out: where it appears.
        update: local - global.
        codec: what it is encoded with; empty: nothing.
        seed: of the training.
        buffers: of the model, which stay plain, as control variates do.
        owed: what a biased codec has left out of the updates before.
        residual: where to write what it leaves out of this one; None: it is forgotten.

    Raises:
        NotFinite: a value that the codec cannot take.
    """
    if not codec:
        return safetensors_file.write(out, update, durable=False)
    parsed, feedback = parse_codec(codec), None
    if parsed.is_biased and residual is not None:
        feedback = Feedback(list(owed), residual)
    rng = np.random.default_rng([seed, CODEC_STREAM])
    plain = [*buffers, *(name for name in update if name.startswith(CONTROL))]
    try:
        return write_encoded(out, update, parsed, rng=rng, plain=plain, feedback=feedback)
    except ValueError as error:
        raise NotFinite(f"the update cannot be encoded: {error}") from error
