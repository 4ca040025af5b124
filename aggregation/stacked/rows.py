"""The fold of updates side by side in memory: the bits of `streaming`, without a file and a reader for each.

    rows (K, F) float32    one update a row, all tensors of the model side by side in canonical order

For thousands of small updates a round, as a simulation has them. `streaming` documents the sum, its grid and the
optimizer's step; a test holds the two folds together. Rows are whole updates of float tensors; rules are not supported.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from atoll.aggregation.custom_optimizer import CustomOptimizer
from atoll.aggregation.fold.grid import grid_exponent, mean_from_grid
from atoll.aggregation.fold.step import Step
from atoll.aggregation.fold.tiles import rounded_to_float32
from atoll.aggregation.stacked.passes import Doubles, Passes, Values, passes_over
from atoll.tensors.layout import Layout, Tensor

Arrays = dict[str, NDArray[Any]]


@dataclass(frozen=True, slots=True)
class Rows:
    """K updates with their weights and factors; see `means.Weighted`."""

    values: Values
    weights: Sequence[int]
    factors: Sequence[float]
    trained_factors: Sequence[float]
    magnitudes: NDArray[np.float32] | None = None
    """(K, T): max |value| of each tensor of each row, not finite where a value is not; None: they are computed."""


def can_stack(layout: Layout, step: Step) -> bool:
    """Return whether the stacked fold supports a layout and a step: all tensors F32; no rule, anchor or `prepare`."""
    if isinstance(step.optimizer, CustomOptimizer) and step.optimizer.has_prepare:
        return False  # the inner products of updates are taken over their files
    return step.rule is None and step.anchor is None and all(tensor.dtype == "F32" for tensor in layout)


def fold_rows(base: Mapping[str, NDArray[Any]], layout: Layout, rows: Rows, step: Step, slots: Arrays) -> Arrays:
    """Return the next version, from the mean of the rows and the server optimizer's step.

    Args:
        base: the global model, by name.
        layout: its tensors, in canonical order, all F32.
        rows: the updates, in any order.
        step: the server optimizer, without a rule.
        slots: by "<slot>/<tensor>", the optimizer's state; changed in place. A missing slot has its initial values.

    Returns:
        The new tensors by name.

    Raises:
        ValueError: no updates, a value that is not finite, or a new value that leaves float32.
    """
    if not len(rows.values):
        raise ValueError("no updates to fold")
    new: Arrays = {}
    passes, start = passes_over(rows.values, sum(tensor.num_elements for tensor in layout)), 0
    for number, tensor in enumerate(layout):
        stop = start + tensor.num_elements
        known = None if rows.magnitudes is None else rows.magnitudes[:, number].astype(np.float64)
        mean = _mean(tensor, passes, start, stop, known, rows, step)
        new[tensor.name] = _moved(tensor, base[tensor.name].reshape(-1), mean, step, slots).reshape(tensor.shape)
        start = stop
    return new


def _mean(
    tensor: Tensor, passes: Passes, start: int, stop: int, known: Doubles | None, rows: Rows, step: Step
) -> Doubles:
    """Return the mean, as `means.ExactMean` computes it; `known`: the magnitudes (K), if they are known."""
    is_trained = step.is_trained(tensor)
    factors = np.array(rows.factors)
    if is_trained:
        factors *= rows.trained_factors
    magnitudes = passes.magnitudes(start, stop) if known is None else known
    if not np.isfinite(magnitudes).all():
        raise ValueError(f"tensor {tensor.name!r}: an update has values that are not finite")
    magnitude, count = float((magnitudes * factors).max()), len(rows.values)
    weights, total_weight = rows.weights, sum(rows.weights)
    divisor, scale = total_weight, step.scale if is_trained else 1.0
    if step.is_control(tensor):
        assert step.num_clients is not None
        weights, total_weight, divisor = [1] * count, count, step.num_clients
    exponent = grid_exponent(magnitude, total_weight=total_weight, count=count)
    scales = np.ldexp(np.array(weights, np.float64), -exponent) * factors
    mean: Doubles = mean_from_grid(passes.sum(start, stop, scales), exponent, total_weight=divisor)
    return mean if scale == 1.0 else np.multiply(mean, scale, out=mean)


def _moved(tensor: Tensor, master: NDArray[Any], mean: Doubles, step: Step, slots: Arrays) -> NDArray[np.float32]:
    """Return the tensor's new values, as `tiles.float_rule` computes them."""
    what = f"tensor {tensor.name!r}: "
    if not step.is_trained(tensor):
        return rounded_to_float32(np.add(master, mean, out=mean), what + "new values")
    state = {name: _before(f"{name}/{tensor.name}", name, tensor, step, slots) for name in step.optimizer.slots}
    place = step.place.at(tensor.name, 0, tensor.num_elements)
    new = step.optimizer.apply(master.astype(np.float64), mean, state, place)
    for name, values in state.items():
        slots[f"{name}/{tensor.name}"] = rounded_to_float32(values, what + name)
    return rounded_to_float32(new, what + "new values")


def _before(key: str, slot: str, tensor: Tensor, step: Step, slots: Arrays) -> Doubles:
    if key in slots:
        return slots[key].astype(np.float64)
    return np.full(tensor.num_elements, np.float32(step.optimizer.init(slot)), np.float64)
