"""The mean of masked updates: the sum of their words, less the streams that still mask it.

    mean = decode(sum_k y_k - streams) / sum_k a_k            y_k: words modulo 2^bits, a_k: the members' weights

Words add exactly in any order, so a rank sums its updates' words, takes the streams off a part of the elements, and
sends the words; any ranks, tiles and threads give the same bits.
"""

from collections.abc import Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

from atoll.aggregation.fold.exchange import Bytes
from atoll.tensors.layout import Tensor
from atoll.tensors.secure.keystream import Words, add_stream
from atoll.tensors.secure.vector import WORD_DTYPE, decode
from atoll.tensors.updates.reader import UpdateReader

Stream = tuple[bytes, int]
"""A key stream and the sign with which it is added to the sum."""


class MaskedMean:
    """The mean of one tensor over the members of a session.

    Args:
        tensor: of the masked updates, I32 or I64.
        readers: of the updates that are here.
        streams: that this process takes off; with several ranks one of them has them, by its elements.
        start: position of the tensor's first element in the streams.
        value_range: R of the tensor.
        weight: sum of a_k, above 0.
    """

    def __init__(
        self,
        tensor: Tensor,
        readers: Sequence[UpdateReader],
        streams: Sequence[Stream],
        *,
        start: int,
        value_range: float,
        weight: float,
    ) -> None:
        self._tensor, self._readers, self._streams, self._start = tensor, readers, streams, start
        self._bits = {"I32": 32, "I64": 64}[tensor.dtype]
        self._range, self._weight = value_range, weight

    def sum(self, start: int, stop: int) -> Words:
        """Return the words of these elements: the sum of the updates that are here, which streams still mask."""
        total: NDArray[Any] = np.zeros(stop - start, WORD_DTYPE[self._bits])
        room = np.empty(stop - start, f"i{self._bits // 8}")
        for reader in self._readers:
            if reader.meets(self._tensor, start, stop):
                total += reader.read(self._tensor, start, stop, room).view(total.dtype)
        return total

    def share(self, start: int, stop: int) -> Words:
        """Return the sum in its form on the wire; empty if this rank has none of these elements."""
        is_here = any(reader.meets(self._tensor, start, stop) for reader in self._readers)
        return self.sum(start, stop) if is_here else np.zeros(0, WORD_DTYPE[self._bits])

    def joined(self, parts: Sequence[Bytes], start: int, stop: int) -> NDArray[np.float64]:
        """Return the mean, from the shares of all ranks."""
        total: NDArray[Any] = np.zeros(stop - start, WORD_DTYPE[self._bits])
        for part in parts:
            if part.size:
                total += part.view(total.dtype)
        return self._mean(total, start)

    def _mean(self, total: Words, start: int) -> NDArray[np.float64]:
        for key, sign in self._streams:
            add_stream(total, key, sign, self._start + start)
        mean = decode(total, self._bits, self._range)
        return np.divide(mean, self._weight, out=mean)

    def __call__(self, start: int, stop: int) -> NDArray[np.float64]:
        """Return the mean when all updates are here."""
        return self._mean(self.sum(start, stop), start)
