"""Draws of the order of examples for many clients, the same as local training draws for each client alone.

They are made by torch, or, if numba is installed and there are many draws, by a compiled loop, because for a few
examples the four calls of torch take longer than the step.
"""

from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import torch

from atoll.simulations.engines.loop import orders
from atoll.tensors.numba_support import Meter

Array = np.ndarray[Any, np.dtype[np.int64]]
Place = Callable[[Array, Sequence[int], Array, Array, Array], None]

CLIENT_ELEMENTS = 1 << 10
"""Cost of torch's calls for a client, measured in elements of the compiled loop."""

TRIED = ((1, 1), (2, 3), (18, 1), (226, 1), (228, 1), (600, 2), (5000, 1))
"""Examples and epochs of clients for which loop and torch must agree before the loop is used."""


def place(rows: Array, seeds: Sequence[int], counts: Array, epochs: Array, strides: Array) -> None:
    """Draw an order of each client's examples for each epoch.

    Args:
        rows: (m, L), the result: the orders of each client at multiples of its stride, cut to L.
        seeds: (m), the seeds of the trainings.
        counts: (m), the numbers of examples.
        epochs: (m), the numbers of epochs.
        strides: (m), at least `counts` if there is more than one epoch.
    """
    (loop_for(len(seeds) * CLIENT_ELEMENTS) or place_by_torch)(rows, seeds, counts, epochs, strides)


def place_by_torch(rows: Array, seeds: Sequence[int], counts: Array, epochs: Array, strides: Array) -> None:
    """Draw the orders with torch, like `place`."""
    generator = torch.Generator()
    lists = (epochs.tolist(), counts.tolist(), strides.tolist())
    for row, seed, num_epochs, count, stride in zip(rows, seeds, *lists, strict=True):
        torch.default_generator.manual_seed(seed)
        for epoch, order in enumerate(orders(count, num_epochs, generator)):
            target = row[epoch * stride : epoch * stride + count]
            target[...] = order.numpy()[: len(target)]


def compiled() -> Place:
    """Return the compiled loop, or `place_by_torch` if this version of torch draws differently."""
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
"""Function from the number of elements to the loop; None until enough was drawn to justify compiling it."""
