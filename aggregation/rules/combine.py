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

from atoll.aggregation.place import NOWHERE, Place
from atoll.aggregation.printable import count_of
from atoll.aggregation.rules.gram import gram_matrix
from atoll.aggregation.rules.rule import (
    GeometricRule,
    Rule,
    RuleFailed,
    call_rule,
    check_count,
    reduced,
    takes_centre,
)
from atoll.aggregation.tensors.layout import Layout, Tensor
from atoll.aggregation.updates.sources import Source

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
    """Return the matrix by which a rule mixes these updates: one pass over them, for rules that look at their geometry.

    Args:
        rule: the run's rule.
        layout: the model's tensors.
        updates: K >= 1, by their names in errors, in the order of their client ids.
        centre: the previous aggregate, for a rule that takes one (`sources.Zeros` in a first round).
        threads: for the Gram matrix.
        place: of the call in its run.

    Returns:
        (R, K), or (R, K + 1) with the centre; None for a rule that reduces the updates as they are.

    Raises:
        ValueError: too few updates for the rule, an update that leaves out a tensor, a rule that takes a centre without
            one, or a user's rule that returns a matrix of another shape or with numbers that are not finite.
    """
    check_count(rule, len(updates))
    if not isinstance(rule, GeometricRule):
        return None
    sources = dict(updates)
    if takes_centre(rule):
        if centre is None:
            raise ValueError(f"{type(rule).__name__} takes the previous aggregate, and got none")
        sources["(previous aggregate)"] = centre
    return checked_mixing(rule, gram_matrix(layout, sources, threads=threads), place)


def checked_mixing(rule: GeometricRule, gram: Array, place: Place = NOWHERE) -> Array:
    """Return the matrix by which a rule mixes updates with these inner products.

    Raises:
        ValueError: too few updates for the rule, or a user's rule that returns a matrix of another shape or with
            numbers that are not finite, or another matrix when it is asked again.
    """
    mixing = np.ascontiguousarray(call_rule(rule, rule.mixing, gram.copy(), place), np.float64)
    if mixing.ndim != 2 or mixing.shape[1] != len(gram) or len(mixing) < 1 or not np.isfinite(mixing).all():
        raise ValueError(
            f"{type(rule).__name__} mixes {count_of(len(gram), 'update')} with a {mixing.shape} matrix, "
            f"expected are finite numbers (R, {len(gram)})"
        )
    if not type(rule).__module__.startswith("atoll."):
        again = np.asarray(call_rule(rule, rule.mixing, gram, place))
        if again.shape != mixing.shape or not np.allclose(again, mixing, rtol=1e-9, atol=1e-12):
            raise RuleFailed(
                f"{type(rule).__name__} mixes the same updates in another way when it is asked again: a rule keeps no "
                "state between calls, and draws from the argument `place` of `mixing(gram, place)`"
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
    scratch: "Scratch | None" = None,
    place: Place = NOWHERE,
) -> Array:
    """Return the update of a rule for the elements [start, stop) of one float tensor. Threads may share all arguments.

    Args:
        tensor: of the elements.
        start: the first element, in the tensor's flat order.
        stop: the element after the last one.
        sources: those that carry the tensor, in the order of their client ids; the centre last, if it is mixed.
        rule: see `rule`.
        mixing: from `mixing_for`, a column for each source.
        scratch: memory to read into, from earlier calls; left out: new memory.
        place: of the fold in its run.

    Returns:
        (stop - start) values of the update.

    Raises:
        ValueError: too few sources for the rule, or a user's rule that returns another number of values.
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
        values = reduced(rule, rows, place.at(tensor.name, begin, end))
        if values.shape != (end - begin,):
            raise ValueError(
                f"tensor {tensor.name!r}: {type(rule).__name__} makes {values.shape} of {count_of(len(rows), 'row')}, "
                f"expected is {(end - begin,)}"
            )
        combined[begin - start : end - start] = values
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
