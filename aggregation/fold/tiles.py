"""What becomes of a tile: some elements of one tensor of the base and of its slots, when their mean update is known."""

from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

from atoll.aggregation.fold.integers import apply_mean
from atoll.aggregation.fold.step import AGGREGATE, Slot
from atoll.aggregation.optimizers import Optimizer
from atoll.aggregation.tensors.layout import Tensor
from atoll.aggregation.tensors.safetensors_file import NUMPY_DTYPES
from atoll.aggregation.updates.reader import UpdateReader

Parts = tuple[NDArray[Any], ...]
"""New values of some elements of one tensor, and of its slots."""

TileRule = Callable[[int, int], Parts]
"""(start, stop) -> what becomes of these elements of one tensor."""

Mean = Callable[[int, int], NDArray[np.float64]]
"""(start, stop) -> the mean update of these elements of one tensor, or what a rule makes in its place."""


def staying_rule(tensor: Tensor, files: Sequence[UpdateReader | Slot]) -> TileRule:
    """A tensor that no update carries, and its slots."""
    dtype = NUMPY_DTYPES[tensor.dtype]
    return lambda start, stop: tuple(file.read(tensor, start, stop).astype(dtype, copy=False) for file in files)


def float_rule(
    tensor: Tensor, masters: UpdateReader, mean_of: Mean, slots: list[Slot], optimizer: Optimizer | None
) -> TileRule:
    """A float tensor follows what the optimizer makes of the mean, and its slots what it keeps; without one, the mean.

    Raises:
        ValueError: by the rule, when a new value leaves float32.
    """
    what = f"tensor {tensor.name!r}: "

    def new_values(start: int, stop: int) -> Parts:
        mean = mean_of(start, stop)
        master = masters.read(tensor, start, stop)
        state = {slot.name: slot.read(tensor, start, stop).astype(np.float64) for slot in slots}
        if AGGREGATE in state:
            state[AGGREGATE] = mean.copy()
        if optimizer is None:
            new = np.add(master, mean, out=mean)
        else:
            new = optimizer.apply(master.astype(np.float64), mean, state)
        kept = (rounded_to_float32(values, what + name) for name, values in state.items())
        return (rounded_to_float32(new, what + "new values"), *kept)

    return new_values


def rounded_to_float32(values: NDArray[np.float64], what: str) -> NDArray[np.float32]:
    """What a version keeps of new values; ValueError, beginning with `what`, when one leaves float32."""
    with np.errstate(over="ignore"):
        rounded = values.astype(np.float32)
    if not np.isfinite(rounded).all():
        raise ValueError(f"{what} in {values.min()}..{values.max()} leave float32")
    return rounded


def integer_rule(tensor: Tensor, masters: UpdateReader, mean_of: Callable[[int, int], NDArray[Any]]) -> TileRule:
    """An integer tensor follows its rounded mean.

    Raises:
        ValueError: by the rule, when a new value leaves its dtype.
    """

    def new_values(start: int, stop: int) -> Parts:
        mean = mean_of(start, stop)
        try:
            return (apply_mean(masters.read(tensor, start, stop), mean, NUMPY_DTYPES[tensor.dtype]),)
        except ValueError as fault:
            raise ValueError(f"tensor {tensor.name!r}: {fault}") from fault

    return new_values
