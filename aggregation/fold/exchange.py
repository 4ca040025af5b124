"""How aggregation ranks hand each other what they have of each other's part of the model.

Every rank calls `swap` the same number of times, in the same order. Bytes alone travel: no objects, nothing is
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


def as_bytes(array: NDArray[np.generic]) -> Bytes:
    """An array's memory, for `Exchange.swap`."""
    return np.ascontiguousarray(array).reshape(-1).view(np.uint8)


def from_all(exchange: Exchange, part: NDArray[np.generic]) -> list[Bytes]:
    """What every rank has, on every rank."""
    return exchange.swap([as_bytes(part)] * exchange.size)


def swapped(
    tiles: Sequence[Sequence[Tile]], share: Callable[[Tile], NDArray[np.generic]], exchange: Exchange, *, threads: int
) -> Generator[tuple[Tile, list[Bytes]], None, None]:
    """This rank's tiles in their order, each with the shares of all ranks.

    Args:
        tiles: of each rank, the same at all.
        share: what this rank has of a tile, whoever owns it; called on threads, ahead.
        exchange: used by the thread that asks.
        threads: how many shares are made at the same time.

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
