"""The metrics of an evaluation in secure sums: what opens of the members' masked words. Pure."""

from collections.abc import Sequence

import numpy as np

from atoll.tensors.secure.exact import decode_exact
from atoll.tensors.secure.keystream import Stream, Streams
from atoll.tensors.secure.masked_layout import Metrics, exact_of, num_exact

WORD = np.dtype("<u8")


def num_bytes_of(metrics: Metrics) -> int:
    """Return the size of what a member adds [bytes]."""
    return num_exact((), metrics) * WORD.itemsize


def opened_metrics(
    masked: Sequence[bytes], streams: Sequence[Stream], metrics: Metrics
) -> dict[str, tuple[float, ...]]:
    """Return the sums of the metrics over the members of a session.

    Args:
        masked: the masked words of each member in the sum.
        streams: to take off the sum, with their signs.
        metrics: of the sum, in order.

    Raises:
        WrongSum: the words are no sum of these members.
    """
    places = exact_of((), metrics)
    total = np.zeros(places.size, np.uint64)
    for words in masked:
        total += np.frombuffer(words, WORD)
    Streams(streams).add(total)
    return dict(decode_exact(total, places, len(masked)).statistics)
