"""In which order each of many clients takes its examples: the one that `parallel.training` draws when it is alone.

By torch, or by a loop that numba compiles when it is installed and much is drawn: for a few examples, four calls of
torch take longer than the step that they are for.
"""

from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import torch

from atoll.aggregation.numba_support import Meter
from atoll.simulations.engines.loop import orders

Array = np.ndarray[Any, np.dtype[np.int64]]
Place = Callable[[Array, Sequence[int], Array, Array, Array], None]

CLIENT_ELEMENTS = 1 << 10
"""What torch's calls for a client cost, in elements of a fold."""

TRIED = ((1, 1), (2, 3), (18, 1), (226, 1), (228, 1), (600, 2), (5000, 1))
"""Examples and epochs of clients for whom loop and torch must agree before the loop is used."""


def place(rows: Array, seeds: Sequence[int], counts: Array, epochs: Array, strides: Array) -> None:
    """Draw.

    Args:
        rows: (m, L); of each client, an order of its examples for each epoch, at multiples of its stride; cut to L.
        seeds: (m) of the trainings.
        counts: (m) examples.
        epochs: (m).
        strides: (m) at least `counts`, where there is more than one epoch.
    """
    (loop_for(len(seeds) * CLIENT_ELEMENTS) or place_by_torch)(rows, seeds, counts, epochs, strides)


def place_by_torch(rows: Array, seeds: Sequence[int], counts: Array, epochs: Array, strides: Array) -> None:
    """The same by torch."""
    generator = torch.Generator()
    lists = (epochs.tolist(), counts.tolist(), strides.tolist())
    for row, seed, num_epochs, count, stride in zip(rows, seeds, *lists, strict=True):
        torch.default_generator.manual_seed(seed)
        for epoch, order in enumerate(orders(count, num_epochs, generator)):
            there = row[epoch * stride : epoch * stride + count]
            there[...] = order.numpy()[: len(there)]


def compiled() -> Place:
    """The loop in machine code; torch again, where this torch draws in another way."""
    from atoll.simulations.engines.batched.draws_compiled import place as loop

    def place_by_loop(rows: Array, seeds: Sequence[int], counts: Array, epochs: Array, strides: Array) -> None:
        loop(rows, np.array([seed & 0xFFFFFFFF for seed in seeds], np.uint32), counts, epochs, strides)

    counts, epochs = np.array(TRIED, np.int64).T.copy()
    strides, seeds = counts + 3, [2**62 + 7919 * number**9 for number in range(len(counts))]
    by_torch, by_loop = np.zeros((2, len(counts), int((strides * epochs).max())), np.int64)
    place_by_torch(by_torch, seeds, counts, epochs, strides)
    place_by_loop(by_loop, seeds, counts, epochs, strides)
    return place_by_loop if np.array_equal(by_torch, by_loop) else place_by_torch


loop_for = Meter(compiled).loops
"""The loop, when enough was drawn; None while torch does it."""
