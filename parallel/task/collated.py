"""Data sets with a collation of their own. Importing this file does not import torch."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any


class Collated:
    """A data set of rows of any form, and the function that makes batches (inputs, targets) of them.

    Args:
        dataset: map-style.
        collate: rows -> (inputs, targets).
    """

    def __init__(self, dataset: Any, collate: Callable[[list[Any]], Any]) -> None:
        self.dataset, self.collate = dataset, collate

    def __len__(self) -> int:
        """Return the number of rows."""
        return len(self.dataset)

    def __getitem__(self, index: int) -> Any:
        """Return one row, as the data set has it."""
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
    """Return the collation of a data set, also of one that wraps a `Collated` one as torch's own do; None: torch's."""
    while not isinstance(dataset, Collated):
        parts = getattr(dataset, "datasets", None)
        dataset = parts[0] if isinstance(parts, Sequence) and parts else getattr(dataset, "dataset", None)
        if dataset is None:
            return None
    return dataset.collate
