"""The inner products of all pairs of updates, in one pass over their blocks.

    g_kl = sum over segments, over tiles of float tensors:  <tile of u_k, tile of u_l>        in float64

A tile is a fixed number of elements of one piece, which depends on K alone. Tiles are summed within each of the
model's 64 segments, then the segments: the same products in the same order with any number of threads or ranks, so
the bits depend on the set of updates alone. float32 products are exact in float64, and no sum of them overflows it.
"""

from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import closing
from functools import partial

import numpy as np
from numpy.typing import NDArray

from atoll.aggregation.ordered_map import computed_ahead
from atoll.tensors.layout import FLOATS, Layout, Piece, Tensor
from atoll.tensors.ownership import segments_of
from atoll.tensors.pieces import first_element
from atoll.tensors.updates.sources import Source

TILE_VALUES = 1 << 20
"""Number of values in one tile, of all updates: 8 MiB for each thread."""

Tile = tuple[Tensor, int, int]


def gram_matrix(layout: Layout, updates: Mapping[str, Source], *, threads: int = 1) -> NDArray[np.float64]:
    """Return the inner products of K >= 1 updates. Memory: one tile and two (K, K) for each thread.

    Args:
        layout: the model's tensors; integer tensors do not take part.
        updates: the updates, by their names in errors, in the order of the rows.
        threads: the number of tiles that are multiplied at the same time.

    Returns:
        (K, K), symmetric.

    Raises:
        ValueError: an update leaves out a float tensor: without it there is no distance to the others.
        TensorFileCorrupted: a file ends early.
    """
    for tensor in layout:
        for name, update in updates.items():
            if tensor.dtype in FLOATS and not update.carries(tensor.name):
                raise ValueError(f"update {name}: tensor {tensor.name!r} is left out, this rule needs all of them")
    sources = tuple(updates.values())
    gram = np.zeros((len(sources), len(sources)))
    for segment in segments_of(layout):
        jobs = ((None, partial(_products_of, sources, tile)) for tile in float_tiles(layout, segment, len(sources)))
        with closing(computed_ahead(jobs, threads=threads)) as finished:
            gram += sum((products for _, products in finished), np.zeros_like(gram))
    return gram


def _products_of(sources: tuple[Source, ...], tile: Tile) -> NDArray[np.float64]:
    tensor, start, stop = tile
    return products([source.read(tensor, start, stop) for source in sources])


def products(blocks: Sequence[NDArray[np.float32]]) -> NDArray[np.float64]:
    """Return the inner products (K, K) of one tile's K blocks (n)."""
    rows = np.empty((len(blocks), blocks[0].size))
    for row, block in zip(rows, blocks, strict=True):
        row[:] = block
    found: NDArray[np.float64] = rows @ rows.T
    return found


def float_tiles(layout: Layout, segment: Iterable[Piece], num_updates: int) -> Iterator[Tile]:
    """Yield the tiles of one segment."""
    tensors, step = {tensor.name: tensor for tensor in layout}, max(1, TILE_VALUES // num_updates)
    for piece in segment:
        if piece.dtype in FLOATS:
            tensor = tensors[piece.tensor]
            begin = first_element(piece, tensor)
            end = begin + piece.num_elements
            yield from ((tensor, start, min(start + step, end)) for start in range(begin, end, step))
