"""The files that a worker writes: version 0 of a task's model, and the update of one training, plain or encoded."""

import json
import logging
from collections.abc import Collection, Sequence
from pathlib import Path

import numpy as np

from atoll.task.arrays import Arrays, layout_of
from atoll.task.errors import NotFinite, TaskBroken
from atoll.tensors import safetensors_file
from atoll.tensors.codecs.codec import CodecBroken
from atoll.tensors.codecs.names import open_codec
from atoll.tensors.layout import BESIDE, Piece
from atoll.tensors.pieces import piece_bytes_of
from atoll.tensors.updates.encoded_writer import Feedback, write_encoded
from atoll.training.base.peft_files import NOTE
from atoll.training.worker.bench import Bench
from atoll.training.worker.warm_start import Start, started

logger = logging.getLogger(__name__)

CODEC_STREAM = 1
"""The stream of the codec's random numbers, beside the training's with the same seed."""


def write_initial(out: Path, bench: Bench, seed: int, start: Start | None = None) -> tuple[tuple[Piece, ...], str]:
    """Write version 0, with a list of its untrained float tensors and a note on its adapter in the header.

    Args:
        out: the file.
        bench: the task.
        seed: the seed of its initial values.
        start: a file whose values replace them, or None.

    Returns:
        The pieces of version 0, and a note on tensors that have kept their initial values, or are not used.

    Raises:
        StartRefused: the file does not fit.
        OSError: a file cannot be read or written.
        Exception: as `Bench.initial`.
    """
    arrays, buffers, note = bench.initial(seed), bench.buffers(), ""
    if start is not None:
        found = started(arrays, bench.aliases(), start, grows=bench.grows)
        arrays, note = found.arrays, found.note
    adapter = bench.adapter(seed)
    metadata = {safetensors_file.BUFFERS: json.dumps(buffers)} if buffers else {}
    metadata |= {NOTE: adapter} if adapter else {}
    pieces = safetensors_file.write(out, arrays, metadata=metadata, piece_bytes=piece_bytes_of(layout_of(arrays)))
    return pieces, note


def write_update(
    out: Path,
    update: Arrays,
    *,
    codec: str,
    seed: int,
    buffers: Collection[str],
    residuals: Sequence[Path] = (),
    residual: Path | None = None,
) -> tuple[Piece, ...]:
    """Write the file of an update; the spool makes it durable.

    Args:
        out: the path of the file.
        update: local - global.
        codec: the codec of the float tensors; empty: they are not encoded.
        seed: the seed of the training.
        buffers: names of the model's untrained tensors, which stay plain, as control variates do.
        residuals: files of the earlier residuals of a biased codec.
        residual: the file for the new residual; None: the remainder is dropped.

    Raises:
        NotFinite: a value that the codec cannot take.
        TaskBroken: an installed package's codec breaks its contract.
    """
    if not codec:
        return safetensors_file.write(out, update, durable=False)
    try:
        parsed, feedback = open_codec(codec), None
    except ValueError as fault:  # a package that has changed since the agent named it: plain values are always accepted
        logger.warning("the update is sent without a codec: %s", fault)
        return safetensors_file.write(out, update, durable=False)
    if parsed.is_biased and residual is not None:
        feedback = Feedback(list(residuals), residual)
    rng = np.random.default_rng([seed, CODEC_STREAM])
    plain = [*buffers, *(name for name in update if name.startswith(BESIDE))]
    try:
        return write_encoded(out, update, parsed, rng=rng, plain=plain, feedback=feedback)
    except CodecBroken as error:
        raise TaskBroken(f"the update cannot be encoded: {error}") from error
    except ValueError as error:
        raise NotFinite(f"the update cannot be encoded: {error}") from error
