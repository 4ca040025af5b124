"""The metrics of an evaluation in a secure sum: the words of one member, and their masked form.

The words are those of `secure/exact` for a model without tensors: canaries, the weight 1, and of each metric of the
terms 1 and its sums in steps of 2^-20, or zeros.
"""

from collections.abc import Iterable, Mapping, Sequence

import numpy as np

from atoll.tensors.secure.exact import encode_exact, fault_of_metric
from atoll.tensors.secure.keystream import Stream, Streams
from atoll.tensors.secure.masked_layout import Metrics, MetricShape, exact_of
from atoll.tensors.secure.vector import WEIGHT_BITS

WORD = np.dtype("<u8")


def encode_metrics(sums: Mapping[str, Sequence[float]], metrics: Metrics) -> tuple[bytes, tuple[str, ...]]:
    """Return the words of one member, and sentences about the metrics whose sums are not in them.

    Args:
        sums: of the evaluation.
        metrics: of the terms, in order.
    """
    shapes, left_out = {name: MetricShape(name, length) for name, length in metrics}, []
    for name, found in sums.items():
        if name not in shapes:
            left_out.append(f"metric {name!r} is not in the terms of the sum")
        elif fault := fault_of_metric(shapes[name], found):
            left_out.append(fault)
    words = encode_exact(
        exact_of((), metrics), weight=1 << WEIGHT_BITS, is_within=True, fills=(), integers={}, statistics=sums
    )
    return words.astype(WORD).tobytes(), tuple(left_out)


def mask_metrics(encoded: bytes, streams: Iterable[Stream]) -> bytes:
    """Return words plus the streams of their session, modulo 2^64; the same streams give the same bytes."""
    words = np.frombuffer(encoded, WORD).astype(np.uint64)
    Streams(streams).add(words)
    return words.astype(WORD).tobytes()
