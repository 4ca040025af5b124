"""How aggregation ranks hand each other what they have of each other's part of the model.

Every rank calls `swap` the same number of times, in the same order. Bytes alone travel: no objects, nothing is
unpickled.
"""

from collections.abc import Sequence
from typing import Protocol

import numpy as np
from numpy.typing import NDArray

Bytes = NDArray[np.uint8]


class Exchange(Protocol):
    """The ranks of one fold, seen from one of them."""

    @property
    def rank(self) -> int:
        """Which of them this is, from 0."""

    @property
    def size(self) -> int:
        """How many there are."""

    def swap(self, parts: Sequence[Bytes]) -> list[Bytes]:
        """Give part j to rank j; returns what each rank gave to this one, in their order.

        Raises:
            ExchangeBroken: a rank is gone, or says nothing in time.
        """


class ExchangeBroken(OSError):
    """The ranks cannot go on together; they begin again when all are back."""


class Alone:
    """One rank that owns everything."""

    rank, size = 0, 1

    def swap(self, parts: Sequence[Bytes]) -> list[Bytes]:
        """What was given."""
        return list(parts)


def as_bytes(array: NDArray[np.generic]) -> Bytes:
    """An array's memory, for `Exchange.swap`."""
    return np.ascontiguousarray(array).reshape(-1).view(np.uint8)


def from_all(exchange: Exchange, part: NDArray[np.generic]) -> list[Bytes]:
    """What every rank has, on every rank."""
    return exchange.swap([as_bytes(part)] * exchange.size)
