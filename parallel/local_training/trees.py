"""Trees of tensors: what models return and data sets give. A tree keeps its types.

Nodes are mappings, lists, tuples, named tuples and dataclasses; a `ModelOutput` of Hugging Face is a mapping whose keys
are attributes, too. Everything else is a leaf.
"""

import copy
import dataclasses
from collections.abc import Callable, Iterator, Mapping, MutableMapping
from typing import Any

import torch


def tensors(tree: Any) -> Iterator[torch.Tensor]:
    """Yield the tensors of a tree, from left to right."""
    if isinstance(tree, torch.Tensor):
        yield tree
    elif isinstance(tree, Mapping):
        for value in tree.values():
            yield from tensors(value)
    elif isinstance(tree, list | tuple):
        for value in tree:
            yield from tensors(value)
    elif _is_dataclass(tree):
        for name in _fields(tree):
            yield from tensors(getattr(tree, name))


def map_tensors(function: Callable[[torch.Tensor], torch.Tensor], tree: Any) -> Any:
    """Return a tree of the same types with the function of each tensor; the tree itself is unchanged.

    A mapping that cannot be changed becomes a dict.
    """
    if isinstance(tree, torch.Tensor):
        return function(tree)
    if isinstance(tree, Mapping):
        return _with_items(tree, {key: map_tensors(function, value) for key, value in tree.items()})
    if isinstance(tree, list | tuple):
        values = [map_tensors(function, value) for value in tree]
        return type(tree)(*values) if hasattr(tree, "_fields") else type(tree)(values)
    if _is_dataclass(tree):
        mapped = copy.copy(tree)
        for name in _fields(tree):
            object.__setattr__(mapped, name, map_tensors(function, getattr(tree, name)))  # frozen ones, too
        return mapped
    return tree


def _with_items(tree: Mapping[Any, Any], items: dict[Any, Any]) -> Any:
    if type(tree) is dict:
        return items
    if not isinstance(tree, MutableMapping):
        return items
    mapped = copy.copy(tree)
    for key, value in items.items():
        mapped[key] = value
    return mapped


def _is_dataclass(tree: Any) -> bool:
    return dataclasses.is_dataclass(tree) and not isinstance(tree, type)


def _fields(tree: Any) -> list[str]:
    return [field.name for field in dataclasses.fields(tree) if hasattr(tree, field.name)]
