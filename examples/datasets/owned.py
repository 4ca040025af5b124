"""Examples of many owners in one data set, and the owner of each: the `data` of a task with natural clients."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray
from torch.utils.data import Subset, TensorDataset

Ints = NDArray[np.int64]

FLOAT32_MAX = float(np.finfo(np.float32).max)
"""The largest float32; a larger input would become infinite."""


class Splits(NamedTuple):
    """A data set with one owner, as it is published: `data=lambda site, split: getattr(splits, split)`."""

    train: TensorDataset
    test: TensorDataset


@dataclass(frozen=True)
class Owned:
    """All examples, and the owner of each.

    It is a task's `data` as it is: `Task(data=owned, sites=owned.sites, ...)`. An owner's data are a view of the one
    data set, so that nothing is copied and a batch is one index operation.
    """

    dataset: TensorDataset
    """The (inputs, targets) of all owners."""

    parts: Mapping[str, Mapping[str, Ints]]
    """The indices of each owner's examples, by split ("train", "test") and owner."""

    @property
    def sites(self) -> tuple[str, ...]:
        """The owners with examples to train on, in the order in which the data name them."""
        return tuple(self.parts["train"])

    def __call__(self, site: str, split: str) -> "Subset[Any] | None":
        """Return the examples of one owner; None if it has none in this split.

        Raises:
            KeyError: there is no such owner.
        """
        if site not in self.parts["train"]:
            raise KeyError(
                f"there is no owner {site!r} (there are {len(self.sites)}: {', '.join(self.sites[:10])}, ...)"
            )
        places = self.parts.get(split, {}).get(site)
        return None if places is None else Subset(self.dataset, places.tolist())

    def pooled(self, split: str) -> "Subset[Any]":
        """Return the examples of all owners in a split: for the server, if the simulation gives it the data."""
        places = [own for own in self.parts.get(split, {}).values()] or [np.empty(0, np.int64)]
        return Subset(self.dataset, np.concatenate(places).tolist())


def by_owner(owners: Sequence[str], test_fraction: float, min_examples: int = 1) -> dict[str, dict[str, Ints]]:
    """Return the indices of each owner's examples: its last ones are the test split, the others the training split.

    Args:
        owners: of each example, in the order of the data set.
        test_fraction: in [0, 1): an owner with n examples tests on floor(n x test_fraction) of them, but on one at
            least if it has two; with 0 there is no test split.
        min_examples: owners with fewer are left out.

    Raises:
        ValueError: the fraction is out of range.
    """
    if not 0 <= test_fraction < 1:
        raise ValueError(f"test_fraction: must be in [0, 1), got {test_fraction}")
    names, first, codes = np.unique(np.asarray(owners), return_index=True, return_inverse=True)
    places = np.split(np.argsort(codes, kind="stable"), np.cumsum(np.bincount(codes))[:-1])
    parts: dict[str, dict[str, Ints]] = {"train": {}, "test": {}}
    for owner in np.argsort(first):
        indices = places[owner]
        if len(indices) < min_examples:
            continue
        num_test = max(int(len(indices) * test_fraction), 1) if test_fraction and len(indices) > 1 else 0
        parts["train"][str(names[owner])] = indices[: len(indices) - num_test]
        if num_test:
            parts["test"][str(names[owner])] = indices[len(indices) - num_test :]
    return parts
