"""The all-to-all exchange between aggregation ranks: each has values for every other rank's part of the model.

Every rank calls `swap` the same number of times, in the same order. Only bytes are sent: no objects, nothing is
unpickled.
"""

import itertools
from collections.abc import Callable, Generator, Sequence
from contextlib import closing
from functools import partial
from typing import Protocol, TypeVar

import numpy as np
from numpy.typing import NDArray

from atoll.aggregation.ordered_map import computed_ahead

Tile = TypeVar("Tile")

Bytes = NDArray[np.uint8]

NOTHING: Bytes = np.zeros(0, np.uint8)


class Exchange(Protocol):
    """One rank's connection to all ranks of a fold."""

    @property
    def rank(self) -> int:
        """The number of this rank, from 0."""

    @property
    def size(self) -> int:
        """The number of ranks of the fold."""

    def swap(self, parts: Sequence[Bytes]) -> list[Bytes]:
        """Send part j to rank j, and return the parts that all ranks send to this one, in their order.

        Raises:
            ExchangeBroken: a rank is gone, or does not answer in time.
        """


class Alone:
    """The exchange of a process that folds by itself."""

    rank, size = 0, 1

    def swap(self, parts: Sequence[Bytes]) -> list[Bytes]:
        """Return the part that this process has for itself."""
        return list(parts)


class ExchangeBroken(OSError):
    """The exchange lost a rank; the ranks restart the fold when all are back."""


def as_bytes(array: NDArray[np.generic]) -> Bytes:
    """Return an array's memory, for `Exchange.swap`."""
    return np.ascontiguousarray(array).reshape(-1).view(np.uint8)


def from_all(exchange: Exchange, part: NDArray[np.generic]) -> list[Bytes]:
    """Return the parts of all ranks, on every rank."""
    return exchange.swap([as_bytes(part)] * exchange.size)


def swapped(
    tiles: Sequence[Sequence[Tile]], share: Callable[[Tile], NDArray[np.generic]], exchange: Exchange, *, threads: int
) -> Generator[tuple[Tile, list[Bytes]], None, None]:
    """Yield this rank's tiles in their order, each with the shares of all ranks.

    Args:
        tiles: each rank's tiles, the same list at all ranks.
        share: returns this rank's share of a tile of any owner; called on threads, ahead.
        exchange: used by the caller's thread.
        threads: the number of shares that are computed at the same time.

    Raises:
        ExchangeBroken: another rank is gone.
    """

    def shares(turn: Sequence[Tile | None]) -> list[Bytes]:
        return [NOTHING if tile is None else as_bytes(share(tile)) for tile in turn]

    jobs = ((turn[exchange.rank], partial(shares, turn)) for turn in itertools.zip_longest(*tiles))
    with closing(computed_ahead(jobs, threads=threads)) as ahead:
        for tile, to_ranks in ahead:
            from_ranks = exchange.swap(to_ranks)
            if tile is not None:
                yield tile, from_ranks
