"""Means over the middle order statistics of each element: the core of the coordinate median and the trimmed mean.

    out_i = (u_(first)i + ... + u_(stop - 1)i) / (stop - first)        u_(0)i <= ... <= u_(R - 1)i

The sum begins at +0.0 and takes the values in their order, in float64: it depends on no order of the updates, and a
zero is +0.0 whatever the signs of the zeros that it comes from. So two ways to sort give the same bits: numpy sorts a
column at a time; the compiled loop runs Batcher's network over whole rows, each comparator for eight or sixteen columns
at once, without the comparators that no rank between `first` and `stop` depends on.

Source: Batcher, "Sorting networks and their applications", AFIPS 1968 (odd-even merge); Knuth, The Art of Computer
Programming, volume 3, algorithm 5.2.2 M.
"""

from collections.abc import Callable, Iterator
from functools import cache
from typing import Any

import numpy as np
from numpy.typing import NDArray

from atoll.tensors.numba_support import has_compiler

TILE_VALUES = 1 << 16
"""Number of values that are sorted at once: 256 KiB stay in a core's private cache."""

TILE_ELEMENTS = 128
"""Divisor of a tile's number of elements: whole vectors, and enough of them to amortize the call of each comparator."""

COMPILED_FROM = 1 << 17
"""Number of values of one call from which loading the compiler pays."""

Rows = NDArray[np.float32]
Out = NDArray[np.float64]


def middle_mean(rows: Rows, first: int, stop: int) -> Out:
    """Return the mean of each element's values from rank `first` to before rank `stop`.

    Args:
        rows: (R, n), no NaN.
        first: the first rank, in 0..R - 1.
        stop: the rank after the last one, in first + 1..R.

    Returns:
        (n) means.
    """
    out = np.empty(rows.shape[1])
    if rows.size >= COMPILED_FROM and has_compiler():
        by_network(rows, first, stop, out)
    else:
        by_sort(rows, first, stop, out)
    return out


def by_sort(rows: Rows, first: int, stop: int, out: Out) -> None:
    """Compute `middle_mean` with numpy, into `out` (n)."""
    step = _tile_elements(len(rows))
    for begin in range(0, out.size, step):
        columns = np.array(rows[:, begin : begin + step].T, order="C")  # a copy; numpy is fast along the last axis
        columns.sort(axis=1)
        total = out[begin : begin + step]
        total[:] = 0.0
        for values in np.ascontiguousarray(columns[:, first:stop].T):
            total += values
        total /= stop - first


def by_network(rows: Rows, first: int, stop: int, out: Out) -> None:
    """Compute `middle_mean` in machine code, into `out` (n); needs numba."""
    compiled()(rows, comparators(len(rows), first, stop), first, stop, _tile_elements(len(rows)), out)


@cache
def comparators(num_rows: int, first: int, stop: int) -> NDArray[np.int64]:
    """Return the comparators, in order, of a network that puts rows first..stop - 1 of a sorted column in place.

    Returns:
        (C, 2) pairs of rows; the lesser value goes to the first row of the pair.
    """
    wanted = set(range(first, stop))
    needed = []
    for pair in reversed(list(_odd_even_merge_sort(num_rows))):
        if not wanted.isdisjoint(pair):
            wanted.update(pair)
            needed.append(pair)
    return np.array(needed[::-1], np.int64).reshape(-1, 2)


def _odd_even_merge_sort(num_rows: int) -> Iterator[tuple[int, int]]:
    merged = 1
    while merged < num_rows:  # runs of `merged` rows are sorted
        distance = merged
        while distance:
            for start in range(distance % merged, num_rows - distance, 2 * distance):
                for low in range(start, min(start + distance, num_rows - distance)):
                    if low // (2 * merged) == (low + distance) // (2 * merged):
                        yield low, low + distance
            distance //= 2
        merged *= 2


def _tile_elements(num_rows: int) -> int:
    return max(1, TILE_VALUES // num_rows // TILE_ELEMENTS) * TILE_ELEMENTS


@cache
def compiled() -> Callable[..., None]:
    """Return the loop in machine code; it is compiled at its first use on a machine, and read from a file afterwards.

    One function serves every number of rows: the network is an argument. No sum is reordered (numba does not), and the
    loop calls no other function of this module: numba would recompile it in every process.
    """
    import numba

    @numba.njit(nogil=True, cache=True)
    def middle(rows: Any, network: Any, first: Any, stop: Any, step: Any, out: Any) -> None:
        tile = np.zeros((rows.shape[0], step), np.float32)
        for begin in range(0, out.size, step):
            total = out[begin : begin + step]
            tile[:, : total.size] = rows[:, begin : begin + step]
            for c in range(network.shape[0]):
                low, high = tile[network[c, 0]], tile[network[c, 1]]
                for i in range(step):
                    x, y = low[i], high[i]
                    low[i] = x if x < y else y
                    high[i] = y if x < y else x
            total[:] = 0.0
            for r in range(first, stop):
                values = tile[r]
                for i in range(total.size):
                    total[i] += np.float64(values[i])
            for i in range(total.size):
                total[i] /= stop - first

    loop: Callable[..., None] = middle
    return loop
