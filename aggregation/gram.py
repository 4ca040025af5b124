"""The inner products of all pairs of updates, in one pass over their blocks.

    g_kl = sum over float tensors, over tiles:  <tile of u_k, tile of u_l>        in float64

A tile is a fixed number of elements of one tensor, and a function of K alone: the same products are summed in the same
order whatever the number of threads, so the bits depend on the set of updates alone. float32 products are exact in
float64, and no sum of them leaves it.
"""

from collections.abc import Iterable, Iterator, Mapping
from contextlib import closing
from functools import partial

import numpy as np
from numpy.typing import NDArray

from atoll.aggregation.ahead import computed_ahead
from atoll.aggregation.layout import FLOATS, Layout, Tensor, in_order
from atoll.aggregation.sources import Source

TILE_VALUES = 1 << 20
"""Values of all updates in one tile: 8 MiB for each thread."""

Tile = tuple[Tensor, int, int]


def gram_matrix(layout: Layout, updates: Mapping[str, Source], *, threads: int = 1) -> NDArray[np.float64]:
    """The inner products of K >= 1 updates. Memory: one tile and two (K, K) for each thread.

    Args:
        layout: the model's tensors; integer tensors do not take part.
        updates: by what errors call them, in the order of the rows.
        threads: how many tiles are multiplied at the same time.

    Returns:
        (K, K), symmetric.

    Raises:
        ValueError: an update leaves out a float tensor: without it there is no distance to the others.
        TensorFileCorrupted: a file ends too early.
    """
    floats = [tensor for tensor in in_order(layout) if tensor.dtype in FLOATS]
    for tensor in floats:
        for name, update in updates.items():
            if not update.carries(tensor.name):
                raise ValueError(f"update {name}: tensor {tensor.name!r} is left out, this rule needs all of them")
    sources = tuple(updates.values())
    step = max(1, TILE_VALUES // len(sources))
    gram = np.zeros((len(sources), len(sources)))
    jobs = ((None, partial(_products, sources, tile)) for tile in _tiles(floats, step))
    with closing(computed_ahead(jobs, threads=threads)) as finished:
        for _, products in finished:
            gram += products
    return gram


def _products(sources: tuple[Source, ...], tile: Tile) -> NDArray[np.float64]:
    tensor, start, stop = tile
    rows = np.empty((len(sources), stop - start))
    for row, source in zip(rows, sources, strict=True):
        row[:] = source.read(tensor, start, stop)
    products: NDArray[np.float64] = rows @ rows.T
    return products


def _tiles(tensors: Iterable[Tensor], step: int) -> Iterator[Tile]:
    for tensor in tensors:
        for start in range(0, tensor.num_elements, step):
            yield tensor, start, min(start + step, tensor.num_elements)
