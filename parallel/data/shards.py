"""The two ways to draw the examples of one part: one permutation of all, or shard by shard in bounded memory."""

from collections.abc import Callable, Sequence
from functools import lru_cache

import numpy as np
import numpy.typing as npt

Take = Callable[[int, int], npt.NDArray[np.int64]]
"""(start, stop) -> the examples at these positions in the part's order; after its end it starts over."""


def generator(seed: int, *key: int) -> np.random.Generator:
    """Return an independent stream of random numbers for each key."""
    return np.random.default_rng(np.random.SeedSequence(seed, spawn_key=key))


def shuffled(
    num_examples: int, start: int, stop: int, *, once: np.random.Generator | None, draw: np.random.Generator | None
) -> Take:
    """Return a part start:stop of all examples, permuted.

    Args:
        num_examples: the number of examples of the data set.
        start: the first example of the part, in the order from `once`.
        stop: the example after the last one.
        once: shuffles all before they are divided into parts; None: the order of the data set.
        draw: shuffles the part; None: it keeps its order.
    """
    size = stop - start
    if once is None and draw is None:
        return lambda first, end: start + np.arange(first, end) % size
    order = np.arange(start, stop) if once is None else once.permutation(num_examples)[start:stop]
    if draw is not None:
        order = draw.permutation(order)
    return lambda first, end: order[np.arange(first, end) % size]


def sharded(
    sizes: Sequence[int],
    start: int,
    stop: int,
    *,
    open_shards: int,
    once: np.random.Generator | None,
    draw: np.random.Generator | None,
) -> Take:
    """Return a part start:stop of all examples in the order of their shards; memory for the open shards alone.

    `draw` shuffles the part's shards, and then the examples of each `open_shards` of them together.

    Args:
        sizes: the sizes of all shards.
        start: the first example of the part, in the order of shards from `once`; the part may cut two shards.
        stop: the example after the last one.
        open_shards: the number of shards that are shuffled together.
        once: shuffles all shards before they are divided into parts; None: the order of the data set.
        draw: shuffles the part; None: it keeps its order.
    """
    runs = _runs(sizes, start, stop, once)
    if draw is not None:
        runs = [runs[index] for index in draw.permutation(len(runs))]
    groups = [runs[first : first + open_shards] for first in range(0, len(runs), open_shards)]
    ends = np.cumsum([sum(len(run) for run in group) for group in groups])
    seeds = [None if draw is None else int(draw.integers(2**63)) for _ in groups]

    @lru_cache(maxsize=2)  # a batch may lie in two
    def members(group: int) -> npt.NDArray[np.int64]:
        order = np.concatenate([np.arange(run.start, run.stop) for run in groups[group]])
        seed = seeds[group]
        return order if seed is None else generator(seed).permutation(order)

    def take(first: int, end: int) -> npt.NDArray[np.int64]:
        positions = np.arange(first, end) % ends[-1]
        where = np.searchsorted(ends, positions, side="right")
        chosen = np.empty(len(positions), np.int64)
        for group in np.unique(where):
            here, order = where == group, members(int(group))
            chosen[here] = order[positions[here] - (ends[group] - len(order))]
        return chosen

    return take


def _runs(sizes: Sequence[int], start: int, stop: int, once: np.random.Generator | None) -> list[range]:
    """Return the runs of examples, one of each shard, that lie in start:stop of the shards in their order."""
    starts = np.cumsum([0, *sizes])
    runs = []
    position = 0
    for index in range(len(sizes)) if once is None else once.permutation(len(sizes)):
        low, high = max(start, position), min(stop, position + sizes[index])
        if low < high:
            runs.append(range(int(starts[index]) + low - position, int(starts[index]) + high - position))
        position += sizes[index]
    return runs
