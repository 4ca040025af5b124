"""The division of a batch by its examples; inputs and targets are trees (`trees`).

Of n examples, a tensor or an array has n rows, and a list has n entries: texts, boxes of images in differing number,
images of differing size. Numbers, a single text, None and tensors of one row are the same in all parts. A list of
fields, such as (labels, weights), is walked like a dict. A list can be both: two fields of two rows, or two entries of
two rows. Then an earlier batch of another size has shown which it is, or torch's collation, whose lists of tensors are
fields, has made it; else it is refused.
"""

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch

from atoll.ground.printable import count_of
from atoll.task.errors import TaskBroken
from atoll.training.data.trees import children, is_record, leaves, with_children

Rows = slice | torch.Tensor
"""Consecutive examples, or the indices (m,) int64 of some."""

Forms = dict[str, bool]
"""Whether a list has an entry for each example, by its name, as batches have shown."""

CONSTANTS = (int, float, complex, bool, str, bytes, type(None), np.generic)
"""Types of leaves that are the same in all parts of a batch."""


class Undivided(TaskBroken):
    """A batch that cannot be divided by its examples."""

    def __init__(self, name: str, what: str) -> None:
        super().__init__(
            f"a step cannot divide its batch: {name} {what}; let Task(collate=...) make tensors with a row for each "
            "example or lists with an entry for each, or train without micro-batches (no accumulation, pipeline or "
            "gradient noise)"
        )


@dataclass(frozen=True, slots=True)
class Cut:
    """The division of a tree of inputs or targets by the batch's examples."""

    take: Callable[[Rows], Any]
    """The function that returns the part of some examples."""

    is_cut: bool
    """Whether a leaf or list of the tree has a row or an entry for each example."""

    keeps: bool = False
    """Whether some tensor of the tree is the same in all parts."""


class Division:
    """The division of a batch, inputs and targets, by its examples.

    Args:
        num_rows: examples of the batch.
        forms: the forms that earlier batches have shown; this batch adds its own.
        may_list: the batch may have lists of tensors with an entry for each example, from a custom collation.
    """

    def __init__(self, num_rows: int, forms: Forms | None = None, *, may_list: bool = True) -> None:
        self.num_rows, self._may_list = num_rows, may_list
        self._forms: Forms = {} if forms is None else forms

    def of(self, tree: Any, name: str) -> Cut:
        """Return the division of a tree.

        Args:
            tree: the inputs or targets.
            name: the name of the tree, for errors.

        Raises:
            Undivided: some part of it has neither a row nor an entry for each example, or it is not clear which.
        """
        if isinstance(tree, torch.Tensor | np.ndarray):
            return self._of_tensor(tree, name)
        if isinstance(tree, CONSTANTS):
            return Cut(lambda _rows: tree, is_cut=False)
        if isinstance(tree, list | tuple) and not is_record(tree):
            return self._of_list(tree, name)
        return self._of_fields(tree, name)

    def _of_tensor(self, tensor: Any, name: str) -> Cut:
        if isinstance(tensor, torch.Tensor) and tensor.is_nested:
            raise Undivided(name, "is a nested tensor")
        length = len(tensor) if tensor.ndim else 1
        if tensor.ndim and length == self.num_rows:
            return Cut(lambda rows: tensor[_on_its_device(rows, tensor)], is_cut=True)
        if length != 1:
            raise Undivided(name, f"has {count_of(length, 'row')} for {count_of(self.num_rows, 'example')}")
        return Cut(lambda _rows: tensor, is_cut=False, keeps=True)

    def _of_fields(self, tree: Any, name: str) -> Cut:
        parts = children(tree)
        if parts is None:
            raise Undivided(name, f"is {type(tree).__name__}, whose rows are not known")
        found = {key: self.of(part, f"{name}[{key!r}]") for key, part in parts.items()}
        return Cut(
            lambda rows: with_children(tree, {key: part.take(rows) for key, part in found.items()}),
            is_cut=any(part.is_cut for part in found.values()),
            keeps=any(part.keeps for part in found.values()),
        )

    def _of_list(self, tree: Any, name: str) -> Cut:
        entries = Cut(lambda rows: _entries(tree, rows), is_cut=True)
        has_length = len(tree) == self.num_rows
        try:
            fields = self._of_fields(tree, name)
        except Undivided:
            if not has_length:
                raise
            return self._known(name, entries, are_entries=True)
        if not has_length:
            if len(tree) > 1 and not fields.is_cut:
                raise Undivided(name, f"is a list of {len(tree)} for {count_of(self.num_rows, 'example')}")
            return self._known(name, fields, are_entries=False)
        if name not in self._forms and fields.is_cut and self._may_list and self.num_rows > 1:
            rows = count_of(self.num_rows, "row")
            raise Undivided(name, f"is a list of {len(tree)} with {rows} each: fields of the batch, or its examples")
        are_entries = self._forms.get(name, not fields.is_cut)
        return entries if are_entries else fields

    def _known(self, name: str, cut: Cut, *, are_entries: bool) -> Cut:
        self._forms[name] = are_entries
        return cut


def num_rows(rows: int | None, *trees: Any) -> int:
    """Return the number of rows of a batch.

    Args:
        rows: the collated examples, each of which may give several rows: then all tensors have the same number of rows,
            and there are no lists; None: unknown, so that the first tensor counts.
        trees: inputs and targets.
    """
    found = [leaf for tree in trees for leaf in leaves(tree)]
    lengths = [len(leaf) for leaf in found if isinstance(leaf, torch.Tensor | np.ndarray) and leaf.ndim]
    if rows is None:
        return lengths[0] if lengths else 0
    has_many = len(set(lengths)) == 1 and not any(True for tree in trees for _ in lists_in(tree))
    return lengths[0] if has_many else rows


def lists_in(tree: Any) -> Iterator[list[Any] | tuple[Any, ...]]:
    """Yield the lists and unnamed tuples of a tree, which may have entries or fields."""
    if isinstance(tree, list | tuple) and not is_record(tree):
        yield tree
    for part in (children(tree) or {}).values():
        yield from lists_in(part)


def _entries(tree: Any, rows: Rows) -> Any:
    return type(tree)(tree[rows] if isinstance(rows, slice) else [tree[index] for index in rows.tolist()])


def _on_its_device(rows: Rows, tensor: Any) -> Any:
    if isinstance(rows, slice):
        return rows
    return rows.to(tensor.device) if isinstance(tensor, torch.Tensor) else rows.numpy()
