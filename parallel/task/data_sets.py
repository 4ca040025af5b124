"""The form of a task's data set: rows by number from 0, and a length. Importing this file does not import torch."""

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

from atoll.parallel.task.collated import Collated
from atoll.parallel.task.errors import TaskBroken

if TYPE_CHECKING:
    from atoll.parallel.task.task import Task

ALLOWED = "allowed: a map-style dataset"
ROWS_OF_COLUMNS = "TensorDataset(inputs, targets) of torch has examples"


def check_form(task: "Task", given: Any, name: str) -> Any:
    """Return what a task gave as data, which may be None.

    Args:
        task: whose own `fit` may read data of other forms, as long as they have a length.
        given: the data.
        name: of the function that gave it, with its arguments, for the message.

    Raises:
        TaskBroken: no rows can be read from it by their numbers.
    """
    if given is not None and task.fit is None and (fault := form_fault(given)):
        raise TaskBroken(f"{name} gave {fault}")
    return given


def form_fault(given: Any) -> str:
    """Return the reason that an object is not a map-style data set; empty if it may be one. Reads no row."""
    is_collated = isinstance(given, Collated)
    rows = given.dataset if is_collated else given
    kind = type(rows).__name__
    if hasattr(rows, "batch_sampler"):
        return f"a {kind}, which makes batches by itself; {ALLOWED}: its rows, `loader.dataset`"
    if not (hasattr(rows, "__getitem__") and _has_length(rows)):
        return f"{kind}, which has no length or no items; {ALLOWED}"
    if isinstance(rows, Mapping) and any(number not in rows for number in range(min(len(rows), 2))):
        return f"a {kind} with the keys {_listed(rows)}, and rows have numbers; {ROWS_OF_COLUMNS}"
    if hasattr(rows, "iloc"):
        return f"a {kind}, whose items are its columns; {ROWS_OF_COLUMNS}"
    if not is_collated and isinstance(rows, tuple | list) and 2 <= len(rows) <= 3 and all(map(_is_array, rows)):
        return f"a {kind} of arrays, whose items are the arrays; {ROWS_OF_COLUMNS}"
    return ""


def _has_length(rows: Any) -> bool:
    try:
        len(rows)
    except (TypeError, NotImplementedError):
        return False
    return True


def _is_array(value: Any) -> bool:
    """Return whether a value is an array of any library."""
    return hasattr(value, "shape") and hasattr(value, "dtype")


def _listed(rows: Mapping[Any, Any]) -> str:
    keys = [str(key) for key in list(rows)[:4]]
    return ", ".join([*keys, "..."] if len(rows) > len(keys) else keys)
