"""The middle of stored updates by hand in numpy: the measure for the robust rules.

Each thread reads a range of the elements of all updates from their files into one array, in the ranges that ours is
called with, and puts the values of each element in order. There are three exact ways:

    columns   a copy in which the values of an element lie side by side, sorted along them
    rows      sorted across the rows as they lie
    network   Batcher's network: a `minimum` and a `maximum` of two rows for each comparator that the middle asks for

They take `step` elements at once, which stay in a cache. The best of a printed sweep counts.
"""

import os
import threading
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from atoll.aggregation.rules.order_statistics import comparators

STEPS = (1 << 10, 1 << 12, 1 << 14)

Rows = NDArray[np.float32]
Out = NDArray[np.float64]


def columns(rows: Rows, first: int, stop: int, out: Out) -> None:
    values = np.array(rows.T, order="C")
    values.sort(axis=1)
    values[:, first:stop].mean(axis=1, dtype=np.float64, out=out)


def rows(rows: Rows, first: int, stop: int, out: Out) -> None:
    np.sort(rows, axis=0)[first:stop].mean(axis=0, dtype=np.float64, out=out)


def network(rows: Rows, first: int, stop: int, out: Out) -> None:
    values = list(np.array(rows))
    spare = np.empty_like(values[0])
    for low, high in comparators(len(values), first, stop).tolist():
        lesser, greater = values[low], values[high]
        np.minimum(lesser, greater, out=spare)
        np.maximum(lesser, greater, out=greater)
        values[low], spare = spare, lesser
    np.mean(values[first:stop], axis=0, dtype=np.float64, out=out)


WAYS: tuple[Callable[[Rows, int, int, Out], None], ...] = (columns, rows, network)


class TightSort:
    """The open files of one round's updates.

    Args:
        paths: of the updates, float32 and nothing else.
        num_elements: of each.
        num_at_once: elements that a thread reads at once.
        pool: of the threads.
    """

    def __init__(self, paths: Sequence[Path], num_elements: int, num_at_once: int, pool: ThreadPoolExecutor) -> None:
        self._fds = [os.open(path, os.O_RDONLY) for path in paths]
        self._num_elements, self._num_at_once, self._pool = num_elements, num_at_once, pool
        self._room = threading.local()  # new memory costs as much as the read

    def __call__(self, way: Callable[[Rows, int, int, Out], None], step: int, first: int, stop: int) -> Out:
        """Return the mean of each element's values from rank `first` to before rank `stop`."""
        out = np.empty(self._num_elements)
        begins = range(0, self._num_elements, self._num_at_once)
        list(self._pool.map(partial(self._part, way, step, first, stop, out), begins))
        return out

    def _part(self, way: Any, step: int, first: int, stop: int, out: Out, begin: int) -> None:
        end = min(begin + self._num_at_once, self._num_elements)
        read = self._rows()[:, : end - begin]
        for row, fd in zip(read, self._fds, strict=True):
            if os.preadv(fd, [row], begin * row.itemsize) != row.nbytes:
                raise EOFError(f"a file ends before element {end}")
        for at in range(0, end - begin, step):
            piece = slice(at, min(at + step, end - begin))
            way(read[:, piece], first, stop, out[begin:end][piece])

    def _rows(self) -> Rows:
        if not hasattr(self._room, "rows"):
            self._room.rows = np.empty((len(self._fds), self._num_at_once), np.float32)
        rows: Rows = self._room.rows
        return rows

    def close(self) -> None:
        """Close the files."""
        for fd in self._fds:
            os.close(fd)
