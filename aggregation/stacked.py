"""The fold of updates that lie in memory side by side: the bits of `fold`, without a file and a reader for each.

    rows (K, F) float32    one update a row, all tensors of the model side by side in canonical order

For thousands of small updates a round, as a simulation has them. What is summed, on which grid, and what the optimizer
makes of it is said in `fold`; a test holds the two together. It takes whole updates of float tensors, and no rule.
"""

import math
import os
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from atoll.aggregation.grid import grid_exponent, mean_from_grid
from atoll.aggregation.kernel import COMPILED_FROM, AddWithin, compiled, has_compiler
from atoll.aggregation.layout import Layout, Tensor
from atoll.aggregation.step import Step
from atoll.aggregation.tiles import rounded_to_float32

Arrays = dict[str, NDArray[Any]]
Doubles = NDArray[np.float64]
Block = NDArray[np.float32] | list[NDArray[np.float32]]
"""One tensor of all updates, (K, n)."""

TILE_VALUES = 1 << 17
"""Values of all updates that numpy works on at once: 1 MiB as doubles stays in the cache."""

COMPILED_TILE = 1 << 15
"""Values that the compiled loop adds up of one update after the other: their sums, 256 KiB, stay in the cache."""

LONG = 1 << 12
"""Values of an update's tensor from which on the compiled loop takes it: to call it for each update costs, too."""

SHARES = 4
"""Of a thread, in which it takes the parts: to give it each by itself takes as long as a small part."""


@dataclass(frozen=True, slots=True)
class Rows:
    """K updates and how each counts; see `means.Weighted`."""

    values: NDArray[np.float32] | Sequence[NDArray[np.float32]]
    """(K, F): a matrix, or K rows wherever they lie. Of few values a matrix is faster."""
    weights: Sequence[int]
    factors: Sequence[float]
    trained_factors: Sequence[float]


def can_stack(layout: Layout, step: Step) -> bool:
    """Whether updates of this model may be folded here."""
    return step.rule is None and step.anchor is None and all(tensor.dtype == "F32" for tensor in layout)


def fold_rows(base: Mapping[str, NDArray[Any]], layout: Layout, rows: Rows, step: Step, slots: Arrays) -> Arrays:
    """The next version.

    Args:
        base: the global model, by name.
        layout: its tensors, in canonical order, all F32.
        rows: the updates, in any order.
        step: the server optimizer, without a rule.
        slots: by "<slot>/<tensor>", what the optimizer keeps; changed in place. One that is not there begins.

    Returns:
        The new tensors by name.

    Raises:
        ValueError: no updates, a value that is not finite, or a new value that leaves float32.
    """
    if not len(rows.values):
        raise ValueError("no updates to fold")
    new: Arrays = {}
    is_large = len(rows.values) * sum(tensor.num_elements for tensor in layout) >= COMPILED_FROM and has_compiler()
    start = 0
    for tensor in layout:
        stop = start + tensor.num_elements
        block = _block(rows.values, start, stop)
        start = stop
        mean = _mean(tensor, block, rows, step, add=compiled() if is_large and tensor.num_elements >= LONG else None)
        new[tensor.name] = _moved(tensor, base[tensor.name].reshape(-1), mean, step, slots).reshape(tensor.shape)
    return new


def _block(values: NDArray[np.float32] | Sequence[NDArray[np.float32]], start: int, stop: int) -> Block:
    """These columns; few of them as a matrix."""
    if isinstance(values, np.ndarray):
        return values[:, start:stop]
    parts = [row[start:stop] for row in values]
    return np.stack(parts) if len(parts) * (stop - start) <= TILE_VALUES else parts


def _mean(tensor: Tensor, block: Block, rows: Rows, step: Step, *, add: AddWithin | None) -> Doubles:
    """As `means.ExactMean` has it."""
    is_trained = step.is_trained(tensor)
    factors = np.array(rows.factors)
    if is_trained:
        factors = factors * np.array(rows.trained_factors)
    magnitudes = _magnitudes(tensor, block)
    magnitude, count = float((magnitudes * factors).max()), len(block)
    weights, total_weight = rows.weights, sum(rows.weights)
    divisor, scale = total_weight, step.scale if is_trained else 1.0
    if step.is_control(tensor):
        assert step.num_clients is not None
        weights, total_weight, divisor = [1] * count, count, step.num_clients
    exponent = grid_exponent(magnitude, total_weight=total_weight, count=count)
    scales = np.array([math.ldexp(weight, -exponent) for weight in weights]) * factors
    mean: Doubles = mean_from_grid(_sum(block, scales, add), exponent, total_weight=divisor)
    return mean if scale == 1.0 else np.multiply(mean, scale, out=mean)


def _magnitudes(tensor: Tensor, block: Block) -> Doubles:
    """(K) largest |element| of each update."""
    if not tensor.num_elements:
        return np.zeros(len(block))
    if isinstance(block, np.ndarray):
        found = np.maximum(block.max(axis=1), -block.min(axis=1)).astype(np.float64)
    else:
        found = np.array(_by_threads(lambda row: max(row.max(), -row.min()), block), np.float64)
    if not np.isfinite(found).all():
        raise ValueError(f"tensor {tensor.name!r}: an update has values that are not finite")
    magnitudes: Doubles = np.abs(found)
    return magnitudes


def _sum(block: Block, scales: Doubles, add: AddWithin | None) -> Doubles:
    """sum_k rint(scale_k u_k), by the compiled loop or by numpy: integers below 2^53, so that no order matters."""
    num_values = len(block[0])
    total = np.zeros(num_values)
    if add is not None:

        def add_up(start: int) -> None:
            tile = total[start : start + COMPILED_TILE]
            for row, scale in zip(block, scales, strict=True):
                add(tile, row[start : start + COMPILED_TILE], scale, math.inf)

        _by_threads(add_up, range(0, num_values, COMPILED_TILE))
        return total
    width = max(1, TILE_VALUES // len(block))
    for start in range(0, num_values, width):
        stop = start + width
        beside = block[:, start:stop] if isinstance(block, np.ndarray) else np.stack([row[start:stop] for row in block])
        scaled = beside.astype(np.float64)
        np.multiply(scaled, scales[:, np.newaxis], out=scaled)
        np.rint(scaled, out=scaled)
        scaled.sum(axis=0, out=total[start : start + width])
    return total


def _by_threads(work: Callable[[Any], Any], parts: Sequence[Any]) -> list[Any]:
    """Of large arrays, on all cores: what is computed of a part depends on no other."""
    cores = len(os.sched_getaffinity(0))
    size = -(-len(parts) // (SHARES * cores))
    shares = [parts[first : first + size] for first in range(0, len(parts), size)]
    with ThreadPoolExecutor(cores) as pool:
        return [found for share in pool.map(lambda share: [work(part) for part in share], shares) for found in share]


def _moved(tensor: Tensor, master: NDArray[Any], mean: Doubles, step: Step, slots: Arrays) -> NDArray[np.float32]:
    """As `tiles.float_rule` has it."""
    what = f"tensor {tensor.name!r}: "
    if not step.is_trained(tensor):
        return rounded_to_float32(np.add(master, mean, out=mean), what + "new values")
    state = {name: _before(f"{name}/{tensor.name}", name, tensor, step, slots) for name in step.optimizer.slots}
    new = step.optimizer.apply(master.astype(np.float64), mean, state)
    for name, values in state.items():
        slots[f"{name}/{tensor.name}"] = rounded_to_float32(values, what + name)
    return rounded_to_float32(new, what + "new values")


def _before(key: str, slot: str, tensor: Tensor, step: Step, slots: Arrays) -> Doubles:
    if key in slots:
        return slots[key].astype(np.float64)
    return np.full(tensor.num_elements, np.float32(step.optimizer.init(slot)), np.float64)
