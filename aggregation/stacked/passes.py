"""The two passes of the stacked fold over columns of K rows: each row's largest magnitude, and the sum on the grid.

    magnitudes (K)    max_i |u_k,i|, not finite where a value is not
    sum (n)           sum_k rint(scale_k u_k,i)

By numpy, or by loops that numba compiles if it is installed and the fold is large. The summands are integers below
2^53 (`grid`), so that no order matters, and the bits are the same.
"""

import os
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from typing import Protocol

import numpy as np
from numpy.typing import NDArray

from atoll.tensors.numba_support import Meter

Floats = NDArray[np.float32]
Doubles = NDArray[np.float64]
Values = Floats | Sequence[Floats]
"""(K, F): a matrix, or K rows wherever they lie."""

TILE_VALUES = 1 << 17
"""Number of values of all rows that numpy processes at once: 1 MiB as doubles stays in the cache."""

STACKED_MAX = 1 << 24
"""Bytes of rows up to which they are copied beside each other for numpy: cheaper for small rows than one call per
row."""

COLUMNS_AT_ONCE = 1 << 12
"""Divisor of the number of columns in a thread's share."""

THREADS_FROM = 1 << 20
"""Number of values from which all cores take part: waking them takes about as long as this many values."""

SHARES = 4
"""Number of shares for each thread: a thread that finishes early takes another one."""


class Passes(Protocol):
    """The two passes over the columns from `start` to `stop` of all rows."""

    def magnitudes(self, start: int, stop: int) -> Doubles:
        """Return (K) the largest |value| of each row; 0 without values."""

    def sum(self, start: int, stop: int, scales: Doubles) -> Doubles:
        """Return (stop - start) sums over all rows, each value scaled by its row's scale (K) and rounded to integer."""


def passes_over(values: Values, num_columns: int) -> Passes:
    """Return the compiled passes if numba is installed and they pay, else numpy's."""
    loops = loops_for(len(values) * num_columns)
    return ByNumpy(values) if loops is None else Compiled(values, loops)


class ByNumpy:
    """The two passes with numpy; see `Passes`."""

    def __init__(self, values: Values) -> None:
        is_apart = not isinstance(values, np.ndarray) and sum(row.nbytes for row in values) <= STACKED_MAX
        self._values = np.stack(list(values)) if is_apart else values

    def magnitudes(self, start: int, stop: int) -> Doubles:
        """Return the magnitudes of the rows; see `Passes.magnitudes`."""
        if start == stop:
            return np.zeros(len(self._values))
        found = [np.maximum(block.max(axis=1), -block.min(axis=1)) for block in self._blocks(start, stop)]
        magnitudes: Doubles = np.abs(np.max(found, axis=0)).astype(np.float64)
        return magnitudes

    def sum(self, start: int, stop: int, scales: Doubles) -> Doubles:
        """Return the sums over the rows; see `Passes.sum`."""
        total, begin = np.zeros(stop - start), 0
        for block in self._blocks(start, stop):
            scaled = block.astype(np.float64)
            np.multiply(scaled, scales[:, np.newaxis], out=scaled)
            np.rint(scaled, out=scaled)
            end = begin + block.shape[1]
            scaled.sum(axis=0, out=total[begin:end])
            begin = end
        return total

    def _blocks(self, start: int, stop: int) -> list[Floats]:
        """Return the values as matrices of some columns each, which stay in the cache."""
        values, width = self._values, max(1, TILE_VALUES // len(self._values))
        edges = [(begin, min(stop, begin + width)) for begin in range(start, stop, width)]
        if isinstance(values, np.ndarray):
            return [values[:, begin:end] for begin, end in edges]
        return [np.stack([row[begin:end] for row in values]) for begin, end in edges]


@dataclass(frozen=True, slots=True)
class Loops:
    """The passes in machine code; the rows are given by the addresses of their first values."""

    largest: Callable[[NDArray[np.uint64], int, int, NDArray[np.uint32]], None]
    """(addresses, start, stop, largest): store in `largest` (K) the largest bits, without sign, of a value of each
    row."""
    add_up: Callable[[NDArray[np.uint64], int, Doubles, Doubles], None]
    """(addresses, start, scales, total): add to `total` (n) the sums of the columns from `start` on."""


class Compiled:
    """The two passes in machine code, on all cores; see `Passes`."""

    def __init__(self, values: Values, loops: Loops) -> None:
        self._rows, self._addresses = _with_addresses(values)
        self._loops = loops

    def magnitudes(self, start: int, stop: int) -> Doubles:
        """Return the magnitudes of the rows; see `Passes.magnitudes`."""
        found = np.zeros(len(self._addresses), np.uint32)

        def look(first: int, last: int) -> None:
            self._loops.largest(self._addresses[first:last], start, stop, found[first:last])

        _by_threads(look, len(self._addresses), 1, stop - start)
        return found.view(np.float32).astype(np.float64)

    def sum(self, start: int, stop: int, scales: Doubles) -> Doubles:
        """Return the sums over the rows; see `Passes.sum`."""
        total = np.zeros(stop - start)

        def add_up(first: int, last: int) -> None:
            self._loops.add_up(self._addresses, start + first, scales, total[first:last])

        _by_threads(add_up, stop - start, COLUMNS_AT_ONCE, len(self._addresses))
        return total


def _with_addresses(values: Values) -> tuple[Values, NDArray[np.uint64]]:
    """Return the rows, which must stay alive, and the address at which each begins."""
    if isinstance(values, np.ndarray):
        matrix = np.ascontiguousarray(values, np.float32)
        begins = np.arange(len(matrix)) * matrix.strides[0] + _address_of(matrix)
        return matrix, begins.astype(np.uint64)
    rows = [np.ascontiguousarray(row, np.float32) for row in values]
    return rows, np.array([_address_of(row) for row in rows], np.uint64)


def _address_of(array: Floats) -> int:
    address: int = array.__array_interface__["data"][0]
    return address


def _by_threads(work: Callable[[int, int], None], count: int, together: int, values_of_each: int) -> None:
    """Call `work` on all cores for shares of 0..count, in multiples of `together`."""
    cores = len(os.sched_getaffinity(0))
    if cores == 1 or count * values_of_each < THREADS_FROM:
        work(0, count)
        return
    size = -(-count // (together * SHARES * cores)) * together
    firsts = range(0, count, size)
    with ThreadPoolExecutor(cores) as pool:
        list(pool.map(work, firsts, [min(count, first + size) for first in firsts]))


def compiled() -> Loops:
    """Return the passes in machine code, compiled at their first use on a machine, and read from a file afterwards."""
    from atoll.aggregation.stacked.kernels import add_up, largest

    return Loops(largest, add_up)


loops_for = Meter(compiled).loops
"""(number of values) -> the loops, or None while numpy works (`numba_support.Meter`)."""
