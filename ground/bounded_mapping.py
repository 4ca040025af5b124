"""Least-recently-used (LRU) mapping of bounded size."""

from collections import OrderedDict
from collections.abc import Iterator, MutableMapping
from typing import TypeVar

Key = TypeVar("Key")
Value = TypeVar("Value")


class BoundedMapping(MutableMapping[Key, Value]):
    """A least-recently-used mapping: reading or writing an entry makes it the newest, the oldest goes first.

    Args:
        size_max: the number of entries beyond which the oldest is forgotten; at least 1.
    """

    def __init__(self, size_max: int) -> None:
        assert size_max >= 1
        self._size_max = size_max
        self._entries: OrderedDict[Key, Value] = OrderedDict()

    def __getitem__(self, key: Key) -> Value:
        self._entries.move_to_end(key)
        return self._entries[key]

    def __setitem__(self, key: Key, value: Value) -> None:
        self._entries[key] = value
        self._entries.move_to_end(key)
        if len(self._entries) > self._size_max:
            self._entries.popitem(last=False)

    def __delitem__(self, key: Key) -> None:
        del self._entries[key]

    def __iter__(self) -> Iterator[Key]:
        return iter(list(self._entries))  # `items` and `values` read while they iterate, which reorders the entries

    def __len__(self) -> int:
        return len(self._entries)
