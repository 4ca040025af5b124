"""Rules over stored updates, in place of the weighted mean: tile by tile, in bounded memory.

    source 1 --block--+
    source 2 --block--+--> mixing A --> rows (R, n) --reduce--> (n) --> next tile
    source K --block--+

    row_r = float32(sum_k A_rk u_k)        in float64, added in the order of the sources, element by element

Elements are independent of each other, so the bits depend neither on tiles nor on threads nor on the caller's ranges.
"""

import threading
from collections.abc import Mapping, Sequence

import numpy as np
from numpy.typing import NDArray

from atoll.aggregation.rules.gram import gram_matrix
from atoll.aggregation.rules.rule import (
    GeometricRule,
    Rule,
    check_count,
    takes_centre,
)
from atoll.plugins.place import NOWHERE, Place
from atoll.tensors.layout import Layout, Tensor
from atoll.tensors.updates.sources import Source

TILE_VALUES = 1 << 23
"""Number of values that are read at once, of all sources: 32 MiB for each thread. See `streaming.TILE_ELEMENTS`."""

MIXED_VALUES = 1 << 18
"""Number of values that are mixed at once, counted in float32 over all arrays: 1 MiB stays in a thread's cache."""

Array = NDArray[np.float64]


def mixing_for(
    rule: Rule,
    layout: Layout,
    updates: Mapping[str, Source],
    *,
    centre: Source | None = None,
    threads: int = 1,
    place: Place = NOWHERE,
) -> Array | None:
    """Return the matrix by which a geometric rule mixes a round's updates, from one pass over them.

    Args:
        rule: the run's rule.
        layout: the model's tensors.
        updates: K >= 1, by their names in errors, in the order of their client ids.
        centre: the previous aggregate, for a rule that takes one (`sources.Zeros` in a first round).
        threads: the threads for the Gram matrix.
        place: the place of the call in its run.

    Returns:
        (R, K), or (R, K + 1) with the centre; None for a rule that reduces the updates without mixing.

    Raises:
        ValueError: too few updates for the rule, an update that leaves out a tensor, a rule that takes a centre without
            one, or a custom rule that fails.
    """
    check_count(rule, len(updates))
    if not isinstance(rule, GeometricRule):
        return None
    sources = dict(updates)
    if takes_centre(rule):
        if centre is None:
            raise ValueError(f"{type(rule).__name__} takes the previous aggregate, and got none")
        sources["(previous aggregate)"] = centre
    return rule.mixing(gram_matrix(layout, sources, threads=threads), place)


def combine(
    tensor: Tensor,
    start: int,
    stop: int,
    sources: Sequence[Source],
    rule: Rule,
    mixing: Array | None = None,
    *,
    scratch: "Scratch | None" = None,
    place: Place = NOWHERE,
) -> Array:
    """Return the update of a rule for the elements [start, stop) of one float tensor. Threads may share all arguments.

    Args:
        tensor: the tensor of the elements.
        start: the first element, in the tensor's flat order.
        stop: the element after the last one.
        sources: the updates that carry the tensor, in the order of their client ids; the centre last, if it is mixed.
        rule: see `rule`.
        mixing: the mixing from `mixing_for`, a column for each source.
        scratch: memory to read into, from earlier calls; left out: new memory.
        place: the place of the fold in its run.

    Returns:
        (stop - start) values of the update.

    Raises:
        ValueError: too few sources for the rule, or a custom rule that fails.
        TensorFileCorrupted: a file ends early.
    """
    check_count(rule, len(sources) - takes_centre(rule))
    combined = np.empty(stop - start)
    step = _power_of_two(TILE_VALUES // len(sources))
    memory = (scratch or Scratch()).rows(len(sources), min(step, stop - start))
    for begin in range(start, stop, step):
        end = min(begin + step, stop)
        rows = memory[:, : end - begin]
        for row, source in zip(rows, sources, strict=True):
            source.read(tensor, begin, end, row)
        if mixing is not None:
            rows = _mix(rows, mixing)
        combined[begin - start : end - start] = rule.reduce(rows, place.at(tensor.name, begin, end))
    return combined


class Scratch(threading.local):
    """Memory of each thread to read into, reused tile after tile: allocating costs as much as the read."""

    def __init__(self) -> None:
        self._values = np.empty(0, np.float32)

    def rows(self, num_rows: int, num_elements: int) -> NDArray[np.float32]:
        """Return (R, n) with undefined values; valid until the next call by this thread."""
        if self._values.size < num_rows * num_elements:
            self._values = np.empty(num_rows * num_elements, np.float32)
        return self._values[: num_rows * num_elements].reshape(num_rows, num_elements)


def _mix(blocks: NDArray[np.float32], mixing: Array) -> NDArray[np.float32]:
    """Return the combinations (R, n) of the blocks (K, n)."""
    num_elements = blocks.shape[1]
    step = _power_of_two(MIXED_VALUES // (2 * len(blocks) + 3 * len(mixing)))
    rows = np.empty((len(mixing), num_elements), np.float32)
    exact = np.zeros((len(blocks), step + 1))  # a spare column: einsum adds a lone element in another order
    for begin in range(0, num_elements, step):
        end = min(begin + step, num_elements)
        exact[:, : end - begin] = blocks[:, begin:end]
        total = np.einsum("rk,kn->rn", mixing, exact[:, : end - begin + 1], optimize=False)
        with np.errstate(over="ignore"):  # the new values are checked when the update is applied
            rows[:, begin:end] = total[:, : end - begin]
    return rows


def _power_of_two(at_most: int) -> int:
    return 1 << max(0, at_most.bit_length() - 1)  # callers cut at powers of two
