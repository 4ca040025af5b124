"""Trees of tensors: outputs of models and batches of data sets. A tree keeps its types.

Nodes are mappings, lists, tuples, named tuples and dataclasses; a `ModelOutput` of Hugging Face is a mapping whose keys
are also attributes. Everything else is a leaf.
"""

import copy
import dataclasses
from collections.abc import Callable, Iterator, Mapping, MutableMapping
from typing import Any

import torch


def tensors(tree: Any) -> Iterator[torch.Tensor]:
    """Yield the tensors of a tree, from left to right."""
    yield from (leaf for leaf in leaves(tree) if isinstance(leaf, torch.Tensor))


def leaves(tree: Any) -> Iterator[Any]:
    """Yield the leaves of a tree, from left to right."""
    parts = children(tree)
    if parts is None:
        yield tree
        return
    for part in parts.values():
        yield from leaves(part)


def map_tensors(function: Callable[[torch.Tensor], torch.Tensor], tree: Any) -> Any:
    """Return a tree of the same types with the function of each tensor; the tree itself is unchanged.

    A mapping that cannot be changed becomes a dict.
    """
    if isinstance(tree, torch.Tensor):
        return function(tree)
    parts = children(tree)
    if parts is None:
        return tree
    return with_children(tree, {key: map_tensors(function, part) for key, part in parts.items()})


def children(tree: Any) -> dict[Any, Any] | None:
    """Return the parts of a node by key, index or field; None: it is a leaf."""
    if isinstance(tree, Mapping):
        return dict(tree.items())
    if isinstance(tree, list | tuple):
        return dict(enumerate(tree))
    if dataclasses.is_dataclass(tree) and not isinstance(tree, type):
        fields = [field.name for field in dataclasses.fields(tree)]
        return {name: getattr(tree, name) for name in fields if hasattr(tree, name)}
    return None


def with_children(tree: Any, parts: dict[Any, Any]) -> Any:
    """Return a node of the same type with other parts."""
    if isinstance(tree, Mapping):
        return _with_items(tree, parts)
    if isinstance(tree, list | tuple):
        return type(tree)(*parts.values()) if is_record(tree) else type(tree)(parts.values())
    changed = copy.copy(tree)
    for name, part in parts.items():
        object.__setattr__(changed, name, part)  # frozen ones, too
    return changed


def is_record(tree: Any) -> bool:
    """Return whether a tuple is a named tuple."""
    return hasattr(tree, "_fields")


def _with_items(tree: Mapping[Any, Any], items: dict[Any, Any]) -> Any:
    if type(tree) is dict:
        return items
    if not isinstance(tree, MutableMapping):
        return items
    mapped = copy.copy(tree)
    for key, value in items.items():
        mapped[key] = value
    return mapped
