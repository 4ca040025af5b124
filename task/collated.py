"""The form of a task's data sets (rows by number) and their collation. Importing this file does not import torch."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from atoll.task.errors import TaskBroken

ALLOWED = "allowed: a map-style dataset"
ROWS_MAX = 1 << 30
"""The largest number of rows of a data set: the order of an epoch takes 8 bytes for each."""
ROWS_OF_COLUMNS = "TensorDataset(inputs, targets) of torch has examples"


class Collated:
    """A data set of rows of any form, and the function that makes batches (inputs, targets) of them.

    Args:
        dataset: map-style.
        collate: rows -> (inputs, targets).
    """

    def __init__(self, dataset: Any, collate: Callable[[list[Any]], Any]) -> None:
        self.dataset, self.collate = dataset, collate

    def __len__(self) -> int:
        """Return the number of rows of the data set."""
        return len(self.dataset)

    def __getitem__(self, index: int) -> Any:
        """Return the row of this number, in the data set's form."""
        return self.dataset[index]


@dataclass(frozen=True, slots=True)
class CollatedData:
    """A task's `data` or `test_data`, whose data sets are `Collated`."""

    data: Callable[..., Any]
    collate: Callable[[list[Any]], Any]

    def __call__(self, *names: str) -> Any:
        """Return the data set with its collation; None if there is none."""
        found = self.data(*names)
        return None if found is None else Collated(found, self.collate)


def collate_of(dataset: Any) -> Callable[[list[Any]], Any] | None:
    """Return the collation of a data set, also of one that wraps a `Collated` one as torch does; None: torch's."""
    while not isinstance(dataset, Collated):
        parts = getattr(dataset, "datasets", None)
        dataset = parts[0] if isinstance(parts, Sequence) and parts else getattr(dataset, "dataset", None)
        if dataset is None:
            return None
    return dataset.collate


def check_form(given: Any, name: str, *, has_fit: bool) -> Any:
    """Check the form of a task's data, and return the data, or None.

    Args:
        given: the data.
        name: the name of the function that gave it, with its arguments, for the message.
        has_fit: the task's `fit` reads the data, in any form.

    Raises:
        TaskBroken: no rows can be read from it by their numbers.
    """
    if given is not None and not has_fit and (fault := form_fault(given)):
        raise TaskBroken(f"{name} gave {fault}")
    return given


def form_fault(given: Any) -> str:
    """Return the reason that an object is not a map-style data set; empty if it may be one. Reads no row."""
    is_collated = isinstance(given, Collated)
    rows = given.dataset if is_collated else given
    kind = type(rows).__name__
    if hasattr(rows, "batch_sampler"):
        return f"a {kind}, which makes batches by itself; {ALLOWED}: its rows, `loader.dataset`"
    if not (_has_items(rows) and _has_length(rows)):
        return f"{kind}, which has no length or no items; {ALLOWED}"
    if (number := _length(rows)) > ROWS_MAX:
        return (
            f"{kind} of {number:,} rows, whose order no epoch can draw; allowed: at most {ROWS_MAX:,}: let its "
            "__len__ return the rows of one epoch"
        )
    if isinstance(rows, Mapping) and any(number not in rows for number in range(min(len(rows), 2))):
        return f"a {kind} with the keys {_listed(rows)}, and rows have numbers; {ROWS_OF_COLUMNS}"
    if hasattr(rows, "iloc"):
        return f"a {kind}, whose items are its columns; {ROWS_OF_COLUMNS}"
    if not is_collated and isinstance(rows, tuple | list) and 2 <= len(rows) <= 3 and all(map(_is_array, rows)):
        return f"a {kind} of arrays, whose items are the arrays; {ROWS_OF_COLUMNS}"
    return ""


def _has_items(rows: Any) -> bool:
    return hasattr(rows, "__getitem__") or hasattr(rows, "__getitems__")


def _has_length(rows: Any) -> bool:
    try:
        _length(rows)
    except (TypeError, NotImplementedError):
        return False
    return True


def _length(rows: Any) -> int:
    """Return the number of rows, also of more than Python can count by `len`."""
    try:
        return len(rows)
    except OverflowError:
        return int(type(rows).__len__(rows))


def _is_array(value: Any) -> bool:
    """Return whether a value is an array of any library."""
    return hasattr(value, "shape") and hasattr(value, "dtype")


def _listed(rows: Mapping[Any, Any]) -> str:
    keys = [str(key) for key in list(rows)[:4]]
    return ", ".join([*keys, "..."] if len(rows) > len(keys) else keys)
