"""Rules over stored updates: in place of `fold`'s weighted mean, tile by tile, in bounded memory.

    source 1 --block--+
    source 2 --block--+--> mixing A --> rows (R, n) --reduce--> (n) --> next tile
    source K --block--+

    row_r = float32(sum_k A_rk u_k)        in float64, added in the order of the sources, element by element

No element sees another one, so the bits depend neither on tiles nor on threads nor on how the caller cuts.
"""

import threading
from collections.abc import Mapping, Sequence

import numpy as np
from numpy.typing import NDArray

from atoll.aggregation.rules.gram import gram_matrix
from atoll.aggregation.rules.rule import GeometricRule, Rule, asked, check_count, takes_centre
from atoll.aggregation.tensors.layout import Layout, Tensor
from atoll.aggregation.updates.sources import Source

TILE_VALUES = 1 << 23
"""Values that are read at once, of all sources: 32 MiB for each thread. See `fold.TILE_ELEMENTS`."""

MIXED_VALUES = 1 << 18
"""Values that are mixed at once, in float32 of all its arrays: 1 MiB stays in a thread's cache."""

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
    mixing = np.ascontiguousarray(asked(rule, rule.mixing, gram), np.float64)
    if mixing.ndim != 2 or mixing.shape[1] != len(gram) or len(mixing) < 1 or not np.isfinite(mixing).all():
        raise ValueError(
            f"{type(rule).__name__} mixes {len(gram)} updates with a {mixing.shape} matrix, "
            f"expected are finite numbers (R, {len(gram)})"
        )
    return mixing


def combine(
    tensor: Tensor,
    start: int,
    stop: int,
    sources: Sequence[Source],
    rule: Rule,
    mixing: Array | None = None,
    *,
    rooms: "Rooms | None" = None,
) -> Array:
    """What a rule makes of the elements [start, stop) of one float tensor. Threads may share all arguments.

    Args:
        tensor: where the elements are.
        start: the first of them, in the tensor's flat order.
        stop: behind the last of them.
        sources: those that carry the tensor, in the order of their client ids; with the centre last, when mixed so.
        rule: see `rules`.
        mixing: of `mixing_for`, a column for each source.
        rooms: of the calls before this one; without, the memory to read into is new.

    Returns:
        (stop - start): the update that the rule gives.

    Raises:
        ValueError: too few sources for the rule, or a user's rule that gives another number of values.
        TensorFileCorrupted: a file ends too early.
    """
    check_count(rule, len(sources) - takes_centre(rule))
    combined = np.empty(stop - start)
    step = _power_of_two(TILE_VALUES // len(sources))
    scratch = (rooms or Rooms()).rows(len(sources), min(step, stop - start))
    for begin in range(start, stop, step):
        end = min(begin + step, stop)
        rows = scratch[:, : end - begin]
        for row, source in zip(rows, sources, strict=True):
            source.read(tensor, begin, end, row)
        if mixing is not None:
            rows = _mix(rows, mixing)
        values = np.asarray(asked(rule, rule.reduce, rows))
        if values.shape != (end - begin,):
            raise ValueError(
                f"tensor {tensor.name!r}: {type(rule).__name__} makes {values.shape} of {len(rows)} rows, "
                f"expected is {(end - begin,)}"
            )
        combined[begin - start : end - start] = values
    return combined


class Rooms(threading.local):
    """For each thread the memory into which it reads, tile after tile: new memory costs as much as the read."""

    def __init__(self) -> None:
        self._values = np.empty(0, np.float32)

    def rows(self, num_rows: int, num_elements: int) -> NDArray[np.float32]:
        """(R, n), with anything in it, until this thread asks again."""
        if self._values.size < num_rows * num_elements:
            self._values = np.empty(num_rows * num_elements, np.float32)
        return self._values[: num_rows * num_elements].reshape(num_rows, num_elements)


def _mix(blocks: NDArray[np.float32], mixing: Array) -> NDArray[np.float32]:
    """The combinations (R, n) of the blocks (K, n)."""
    num_elements = blocks.shape[1]
    step = _power_of_two(MIXED_VALUES // (2 * len(blocks) + 3 * len(mixing)))
    rows = np.empty((len(mixing), num_elements), np.float32)
    exact = np.zeros((len(blocks), step + 1))  # einsum adds in another order where an element is alone
    for begin in range(0, num_elements, step):
        end = min(begin + step, num_elements)
        exact[:, : end - begin] = blocks[:, begin:end]
        total = np.einsum("rk,kn->rn", mixing, exact[:, : end - begin + 1], optimize=False)
        with np.errstate(over="ignore"):  # whoever applies the update looks at its size
            rows[:, begin:end] = total[:, : end - begin]
    return rows


def _power_of_two(at_most: int) -> int:
    return 1 << max(0, at_most.bit_length() - 1)  # callers cut at powers of two
