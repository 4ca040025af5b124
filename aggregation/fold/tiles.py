"""New values of a tile (some elements of one tensor and of its slots), from the base and the mean update."""

from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

from atoll.aggregation.fold.integers import apply_mean
from atoll.aggregation.fold.step import AGGREGATE, Slot, Step
from atoll.tensors.layout import Tensor
from atoll.tensors.safetensors_file import NUMPY_DTYPES
from atoll.tensors.updates.reader import UpdateReader

Parts = tuple[NDArray[Any], ...]
"""New values of some elements of one tensor, and of its slots."""

TileRule = Callable[[int, int], Parts]
"""(start, stop) -> the new values of these elements of one tensor."""

Mean = Callable[[int, int], NDArray[np.float64]]
"""(start, stop) -> the mean update of these elements of one tensor, or a rule's result in its place."""


def staying_rule(tensor: Tensor, files: Sequence[UpdateReader | Slot]) -> TileRule:
    """Return the tile rule of a tensor that no update carries: it and its slots keep their values."""
    dtype = NUMPY_DTYPES[tensor.dtype]
    return lambda start, stop: tuple(file.read(tensor, start, stop).astype(dtype, copy=False) for file in files)


def float_rule(tensor: Tensor, masters: UpdateReader, mean_of: Mean, slots: list[Slot], step: Step) -> TileRule:
    """Return the rule by which the fold updates a float tensor.

    A trained tensor follows the optimizer, its slots the optimizer's state; any other tensor follows the mean.

    The rule raises ValueError if a new value leaves float32.
    """
    what = f"tensor {tensor.name!r}: "

    def new_values(start: int, stop: int) -> Parts:
        mean = mean_of(start, stop)
        master = masters.read(tensor, start, stop)
        state = {slot.name: slot.read(tensor, start, stop).astype(np.float64) for slot in slots}
        if AGGREGATE in state:
            state[AGGREGATE] = mean.copy()
        if step.is_trained(tensor):
            place = step.place.at(tensor.name, start, stop)
            new = step.optimizer.apply(master.astype(np.float64), mean, state, place)
        else:
            new = np.add(master, mean, out=mean)
        slot_values = (rounded_to_float32(values, what + name) for name, values in state.items())
        return (rounded_to_float32(new, what + "new values"), *slot_values)

    return new_values


def rounded_to_float32(values: NDArray[np.float64], what: str) -> NDArray[np.float32]:
    """Round new values to float32, in which they are stored.

    Raises:
        ValueError: a value leaves float32; the message begins with `what`.
    """
    with np.errstate(over="ignore"):
        rounded = values.astype(np.float32)
    if not np.isfinite(rounded).all():
        raise ValueError(f"{what} in {values.min()}..{values.max()} leave float32")
    return rounded


def integer_rule(tensor: Tensor, masters: UpdateReader, mean_of: Callable[[int, int], NDArray[Any]]) -> TileRule:
    """Return the rule of an integer tensor: it follows its rounded mean.

    The rule raises ValueError if a new value leaves its dtype.
    """

    def new_values(start: int, stop: int) -> Parts:
        mean = mean_of(start, stop)
        try:
            return (apply_mean(masters.read(tensor, start, stop), mean, NUMPY_DTYPES[tensor.dtype]),)
        except ValueError as fault:
            raise ValueError(f"tensor {tensor.name!r}: {fault}") from fault

    return new_values
