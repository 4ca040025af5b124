"""Rules over stored updates: in place of `fold`'s weighted mean, tile by tile, in bounded memory.

    source 1 --block--+
    source 2 --block--+--> mixing A --> rows (R, n) --reduce--> (n) --> next tile
    source K --block--+

    row_r = float32(sum_k A_rk u_k)        in float64, added in the order of the sources, element by element

No element sees another one, so the bits depend neither on tiles nor on threads nor on how the caller cuts.
"""

from collections.abc import Iterator, Mapping, Sequence

import numpy as np
from numpy.typing import NDArray

from atoll.aggregation.gram import gram_matrix
from atoll.aggregation.layout import Layout, Tensor
from atoll.aggregation.rules import GeometricRule, Rule, check_count, takes_centre
from atoll.aggregation.sources import Source

TILE_VALUES = 1 << 18
"""Values of one tile, in float32 of all its arrays: 1 MiB stays in a thread's cache."""

TILES_READ = 4
"""Tiles that are read at once, 4 MiB: threads wait for each other at every read, so they are few and long."""

Array = NDArray[np.float64]


def mixing_for(
    rule: Rule, layout: Layout, updates: Mapping[str, Source], *, centre: Source | None = None, threads: int = 1
) -> Array | None:
    """How a rule mixes these updates: one pass over them, for rules that look at their geometry.

    Args:
        rule: of the run.
        layout: the model's tensors.
        updates: K >= 1, by what errors call them, in the order of their client ids.
        centre: the previous aggregate, for a rule that takes one (`sources.Zeros` before there is any).
        threads: for the Gram matrix.

    Returns:
        (R, K), or (R, K + 1) with the centre; None for a rule that reduces the updates as they are.

    Raises:
        ValueError: too few updates for the rule, an update that leaves out a tensor, a rule that takes a centre without
            one, or a user's rule that gives a matrix of another shape or with numbers that are not finite.
    """
    check_count(rule, len(updates))
    if not isinstance(rule, GeometricRule):
        return None
    sources = dict(updates)
    if takes_centre(rule):
        if centre is None:
            raise ValueError(f"{type(rule).__name__} takes the previous aggregate, and got none")
        sources["(previous aggregate)"] = centre
    return checked_mixing(rule, gram_matrix(layout, sources, threads=threads))


def checked_mixing(rule: GeometricRule, gram: Array) -> Array:
    """How a rule mixes updates with these inner products.

    Raises:
        ValueError: too few updates for the rule, or a user's rule that gives a matrix of another shape or with numbers
            that are not finite.
    """
    mixing = np.ascontiguousarray(rule.mixing(gram), np.float64)
    if mixing.ndim != 2 or mixing.shape[1] != len(gram) or len(mixing) < 1 or not np.isfinite(mixing).all():
        raise ValueError(
            f"{type(rule).__name__} mixes {len(gram)} updates with a {mixing.shape} matrix, "
            f"expected are finite numbers (R, {len(gram)})"
        )
    return mixing


def combine(
    tensor: Tensor, start: int, stop: int, sources: Sequence[Source], rule: Rule, mixing: Array | None = None
) -> Array:
    """What a rule makes of the elements [start, stop) of one float tensor. Threads may share all arguments.

    Args:
        tensor: where the elements are.
        start: the first of them, in the tensor's flat order.
        stop: behind the last of them.
        sources: those that carry the tensor, in the order of their client ids; with the centre last, when mixed so.
        rule: see `rules`.
        mixing: of `mixing_for`, a column for each source.

    Returns:
        (stop - start): the update that the rule gives.

    Raises:
        ValueError: too few sources for the rule, or a user's rule that gives another number of values.
        TensorFileCorrupted: a file ends too early.
    """
    check_count(rule, len(sources) - takes_centre(rule))
    num_rows = len(sources) if mixing is None else len(mixing)
    num_values = num_rows if mixing is None else 2 * len(sources) + 3 * num_rows
    step = 1 << max(0, (TILE_VALUES // num_values).bit_length() - 1)  # callers cut at powers of two
    scratch = np.empty((step, num_rows), np.float32).T
    combined, done = np.empty(stop - start), 0
    for blocks in _tiles(tensor, start, stop, sources, step=step):
        rows = scratch[:, : blocks[0].size]
        if mixing is None:
            _stack(blocks, rows)
        else:
            _mix(blocks, mixing, rows)
        values = np.asarray(rule.reduce(rows))
        if values.shape != blocks[0].shape:
            raise ValueError(
                f"tensor {tensor.name!r}: {type(rule).__name__} makes {values.shape} of {num_rows} rows, "
                f"expected is {blocks[0].shape}"
            )
        combined[done : done + values.size] = values
        done += values.size
    return combined


def _tiles(
    tensor: Tensor, start: int, stop: int, sources: Sequence[Source], *, step: int
) -> Iterator[list[NDArray[np.float32]]]:
    """The same `step` elements of all sources, tile after tile: K arrays (n)."""
    for begin in range(start, stop, TILES_READ * step):
        end = min(begin + TILES_READ * step, stop)
        blocks = [source.read(tensor, begin, end) for source in sources]
        for low in range(0, end - begin, step):
            yield [block[low : low + step] for block in blocks]


def _stack(blocks: Sequence[NDArray[np.float32]], rows: NDArray[np.float32]) -> None:
    """The blocks as they are, to rows (K, n)."""
    for row, block in zip(rows, blocks, strict=True):
        row[:] = block


def _mix(blocks: Sequence[NDArray[np.float32]], mixing: Array, rows: NDArray[np.float32]) -> None:
    """The combinations of the blocks, to rows (R, n)."""
    num_elements = blocks[0].size
    exact = np.zeros((len(blocks), num_elements + 1))  # einsum adds in another order where an element is alone
    for row, block in zip(exact, blocks, strict=True):
        row[:num_elements] = block
    total = np.einsum("rk,kn->rn", mixing, exact, optimize=False)
    with np.errstate(over="ignore"):  # whoever applies the update looks at its size
        rows[:] = total[:, :num_elements]
