"""The custom statistics of a task's function as parts, all checked. Importing this file does not import torch."""

import math
from collections.abc import Iterator, Mapping
from fractions import Fraction
from typing import Any

import numpy as np

from atoll.ground.printable import count_of
from atoll.task.errors import TaskBroken
from atoll.task.statistic import Statistic
from atoll.training.statistics.parts import (
    MERGES,
    NAME_LETTERS_MAX,
    NUMBERS_MAX,
    SPLITS,
    Numbers,
    Part,
    Place,
    SiteStatistics,
    count,
)

EXAMPLES = "examples"
"""The name of a count that is the number of examples of the split."""

NOT_FINITE = "NaN or infinite"
OWN_MAX = 100
"""Most names of a task's custom statistics."""


def own_parts(given: Any, split: str) -> SiteStatistics:
    """Return the result of a task's `statistics` as parts; numbers that are not finite are left out by name.

    Raises:
        TaskBroken: it is no mapping from names to numbers; the message lists all faults.
    """
    if not isinstance(given, Mapping):
        raise TaskBroken(f"statistics must return a mapping from names to numbers, got {type(given).__name__}")
    found = {name: item if isinstance(item, Statistic) else Statistic(item) for name, item in given.items()}
    arrays = {name: _array(item.value) for name, item in found.items()}
    if faults := [*_faults(found, arrays)]:
        raise TaskBroken(*(f"statistics: {fault}" for fault in faults))
    parts: dict[Place, Part] = {}
    withheld: dict[Place, str] = {}
    for name, item in found.items():
        array = arrays[name]
        assert array is not None
        place = (split, "own", name)
        is_examples = name == EXAMPLES and item.merge in ("sum", "count") and not array.shape
        values = [value.item() if isinstance(value, np.generic) else value for value in array.reshape(-1)]
        if not all(map(math.isfinite, values)):
            withheld[place] = NOT_FINITE
        elif is_examples:
            parts[split, "examples", ""] = Numbers("count", (), (Fraction(values[0]),))
        else:
            parts[place] = Numbers(item.merge, array.shape, tuple(map(Fraction, values)))
    return SiteStatistics(parts, withheld)


def of_array_task(task: Any, site: str) -> SiteStatistics:
    """Return the statistics of a site by the `statistics` and `num_examples` of an `ArrayTask`, in the present context.

    Raises:
        TaskBroken: it has neither, or their results cannot be used.
    """
    if why_not := cannot_give(task):
        raise TaskBroken(why_not)
    parts: dict[Place, Part] = {}
    withheld: dict[Place, str] = {}
    num_examples: Any = getattr(task, "num_examples", None)
    statistics: Any = getattr(task, "statistics", None)
    if num_examples is not None:
        parts["train", "examples", ""] = count(int(num_examples(site)))
    for split in SPLITS if statistics is not None else ():
        if (given := statistics(site, split)) is not None:
            found = own_parts(given, split)
            parts |= found.parts
            withheld |= found.withheld
    return SiteStatistics(parts, withheld)


def cannot_give(task: Any) -> str:
    """Return the reason why an `ArrayTask` has no statistics of its data; empty if it has some."""
    if any(getattr(task, name, None) is not None for name in ("statistics", "num_examples")):
        return ""
    return "the task has no statistics of its data: an ArrayTask gives them by `statistics` or `num_examples`"


def _array(value: Any) -> Any:
    """Return a number, or an array of numbers, as a numpy array; None for other values."""
    if hasattr(value, "detach"):  # a tensor of torch, perhaps on another device
        value = value.detach().cpu()
        value = value.float() if str(value.dtype) in ("torch.bfloat16", "torch.float16") else value
    try:
        array = np.asarray(value)
    except (TypeError, ValueError):
        return None
    if array.dtype == object and all(type(item) is int for item in array.reshape(-1)):
        return array  # whole numbers beyond 64 bits
    return array if array.dtype.kind in "biuf" and array.dtype.itemsize <= 8 else None


def _faults(found: Mapping[Any, Statistic], arrays: Mapping[Any, Any]) -> Iterator[str]:
    if len(found) > OWN_MAX:
        yield f"{len(found)} names; allowed: at most {OWN_MAX}"
    for name, item in found.items():
        if not (isinstance(name, str) and 1 <= len(name) <= NAME_LETTERS_MAX and name.isprintable()):
            yield f"{name!r} is not a name of 1 to {NAME_LETTERS_MAX} printable characters"
        if item.merge not in MERGES:
            yield f"{name}: merge is {item.merge!r}; allowed: {', '.join(MERGES)}"
        array = arrays[name]
        if array is None:
            yield f"{name}: got {type(item.value).__name__}, no number and no array of numbers"
        elif item.merge == "count" and not _are_counts(array):
            yield f"{name}: counts must be whole numbers >= 0"
        elif any(isinstance(value, int) and value.bit_length() > 1024 for value in array.reshape(-1)):
            yield f"{name}: a number of more than 1,024 bits"
    total = sum(array.size for array in arrays.values() if array is not None)
    if total > NUMBERS_MAX:
        yield f"{count_of(total, 'number')}; allowed: at most {NUMBERS_MAX} together"


def _are_counts(array: Any) -> bool:
    return array.dtype.kind in "biuO" and all(value >= 0 for value in array.reshape(-1))
