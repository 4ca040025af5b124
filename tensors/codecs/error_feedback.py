"""Error feedback: the client adds the remainder of a biased codec to its next update.

    p  = u + e              the update and the residual
    send C(p)               what the coordinator decodes
    e' = p - C(p)           the residual after the update is accepted

The residual e belongs to the client, in the units of the parameters (updates are local - global, so a learning rate
that changes does no harm), one float32 tensor beside each float tensor of the model; it begins at 0. Over the accepted
updates the sum telescopes: sum C(p) = sum u - (last e - first e), so nothing is lost, only late.

*The residual moves with acceptance alone* (in `client/disk/residual_store.py`). An update is encoded once, into the
spool; e' is stored beside it under a separate name, and e stays until the outcome is known:

    accepted         e' replaces e          an atomic rename
    anything else    e stays, e' is deleted

The other outcomes are a refusal, a missed deadline, a lost spool. If e' were committed then, C(p), and with it the part
of e that it carried, would be lost. The refused update itself is not added either (p as the new residual): an update
that a round's policy did not admit must not enter through the next round, uninvited and undiscounted. A client that
stops between the acceptance and the rename finds both files and asks the coordinator again, which remembers the updates
that it accepted; that is why the name of e' contains the update's digest. A round that is abandoned after the
acceptance changes nothing: its updates are lost with or without a codec, or count in the next round. While an outcome
is open, e belongs to that update: the next one is encoded without a residual, and when both are accepted, the sum of
both remainders is the residual.

A client that is sampled seldom feeds back an old residual, which points along an old model's slope; with codecs that
transmit little (topk:0.001) and rare participation this costs accuracy. Nothing here discounts it.

Source: Seide et al., "1-Bit Stochastic Gradient Descent and its Application to Data-Parallel Distributed Training of
Speech DNNs", Interspeech 2014; Karimireddy et al., "Error Feedback Fixes SignSGD and other Gradient Compression
Schemes", ICML 2019, Algorithm 2. The rule of the commit is ours.
"""

from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass

import numpy as np

from atoll.tensors.codecs.chunks import chunk_bounds
from atoll.tensors.codecs.codec import Codec, CodecBroken, Values
from atoll.tensors.layout import FLOATS, Tensor

ReadTensor = Callable[[Tensor, int, int], Values]
"""(tensor, start, stop) -> float32 elements [start, stop) in flat C order: `UpdateReader.read`."""


@dataclass(frozen=True, slots=True)
class FedChunk:
    """One chunk of an update, encoded together with its residual."""

    tensor: Tensor
    data: bytes
    """C(p), for the update."""
    residual: Values
    """e' = p - C(p), for the file that becomes the residual when the update is accepted."""


def encode_with_feedback(
    codec: Codec, update: Values, residual: Values, rng: np.random.Generator
) -> tuple[bytes, Values]:
    """Return C(u + e) and e' of one chunk.

    e' is the remainder of the coordinator's decoding: u + e = decode(C) + e' up to one rounding of float32.

    Args:
        codec: the codec of the update.
        update: (n) u.
        residual: (n) e.
        rng: the codec's generator.

    Returns:
        The bytes, and (n) e'.

    Raises:
        ValueError: u + e cannot be encoded (`Codec.encode`).
        CodecBroken: the codec refuses what it has written.
    """
    with np.errstate(over="ignore"):  # the codec refuses infinite values
        corrected = update + residual
    data = codec.encode(corrected, rng)
    try:
        return data, corrected - codec.decode(data, corrected.size)
    except ValueError as fault:
        raise CodecBroken(f"{codec.name} refuses what it has written: {fault}") from fault


def feed(
    codec: Codec,
    tensors: Iterable[Tensor],
    update: ReadTensor,
    residual: ReadTensor | None,
    rng: np.random.Generator,
) -> Iterator[FedChunk]:
    """Encode the float tensors of an update chunk by chunk. Memory is a few chunks.

    In canonical order of the tensors, the residuals follow each other as `safetensors_file.TensorFileWriter` takes them
    (with a layout of F32, whatever floats the update has).

    Args:
        codec: the codec of the update.
        tensors: the tensors of the update, in the order in which they are encoded; integer tensors are skipped.
        update: reads u.
        residual: reads e; None while there is no residual.
        rng: the codec's generator.

    Raises:
        ValueError: a chunk cannot be encoded; the message names it.
    """
    for tensor in tensors:
        if tensor.dtype not in FLOATS:
            continue
        for start, stop in chunk_bounds(tensor.num_elements):
            before = residual(tensor, start, stop) if residual is not None else np.zeros(stop - start, np.float32)
            try:
                data, after = encode_with_feedback(codec, update(tensor, start, stop), before, rng)
            except ValueError as fault:
                raise ValueError(f"tensor {tensor.name!r}, elements {start}..{stop}: {fault}") from fault
            yield FedChunk(tensor, data, after)
