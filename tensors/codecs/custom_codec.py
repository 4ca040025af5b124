"""A custom codec behind the contract `Codec`: its code may raise and return anything, and costs one update."""

import operator
from typing import Any

import numpy as np

from atoll.ground.printable import count_of
from atoll.plugins.guard import Guarded, called
from atoll.tensors.codecs.codec import (
    CHUNK_ELEMENTS,
    FLOAT32_MAX,
    CodecBroken,
    Values,
    check_finite,
    check_size,
    check_values,
    output_array,
)

CHUNK_BYTES_MAX = 8 * CHUNK_ELEMENTS
"""Largest size of a chunk [bytes], whatever its length: twice the size of the longest plain chunk."""


class CustomCodec(Guarded):
    """A custom codec, guarded.

    Every exception of its `num_bytes` and `decode` becomes a ValueError, as for bytes that no encoder writes. It gets
    read-only values and a copy of the bytes; the values that it returns are checked and copied.

    Args:
        name: on the wire and in errors.
        custom: an object with the methods of a codec.

    Raises:
        ValueError: it does not say whether it is biased.
    """

    failed = ValueError

    def __init__(self, name: str, custom: Any) -> None:
        super().__init__(name, custom)
        self.is_biased: bool = called(f"{name}: is_biased", lambda: custom.is_biased, failed=ValueError)
        if type(self.is_biased) is not bool:
            raise ValueError(f"{name}: is_biased is {self.is_biased!r}; allowed: True or False")
        self._sizes: dict[int, int] = {}

    def num_bytes(self, num_elements: int) -> int:
        """Return the exact size of a chunk [bytes], the same in each call; 0 for no elements.

        Raises:
            ValueError: the custom code says no size, or raises.
        """
        if num_elements == 0:
            return 0
        if (known := self._sizes.get(num_elements)) is not None:
            return known
        name = f"{self.name}: num_bytes({num_elements})"
        size: int = called(name, lambda: _whole(self.custom.num_bytes(num_elements)), failed=ValueError)
        if not 1 <= size <= CHUNK_BYTES_MAX:
            raise ValueError(f"{name} is {size}; allowed: 1..{CHUNK_BYTES_MAX}")
        return self._sizes.setdefault(num_elements, size)

    def encode(self, values: Values, rng: np.random.Generator) -> bytes:
        """Encode one chunk; see `Codec.encode`.

        Raises:
            CodecBroken: the custom code raises, or returns no bytes or another number of them.
        """
        check_values(self.name, values, FLOAT32_MAX)
        shown = values.view()
        shown.flags.writeable = False
        name = f"{self.name}: encode"
        data = called(name, self.custom.encode, shown, rng, failed=CodecBroken, passing=(ValueError,))
        if not isinstance(data, bytes | bytearray | memoryview):
            raise CodecBroken(f"{name} returned an object of the type {type(data).__name__}, not bytes")
        data, size = bytes(data), self.num_bytes(values.size)
        if len(data) != size:
            of = count_of(values.size, "element")
            raise CodecBroken(f"{name} returned {count_of(len(data), 'byte')} for {of}, not {size}")
        return data

    def decode(self, data: bytes | memoryview, num_elements: int, out: Values | None = None) -> Values:
        """Decode one chunk; see `Codec.decode`.

        Raises:
            ValueError: also when the custom code raises, or returns anything but n finite float32.
        """
        check_size(self, data, num_elements)
        found = self.call("decode", bytes(data), num_elements)
        if not (isinstance(found, np.ndarray) and found.dtype == np.float32 and found.shape == (num_elements,)):
            is_array = isinstance(found, np.ndarray)
            got = f"{found.dtype} {found.shape}" if is_array else f"an object of the type {type(found).__name__}"
            raise ValueError(f"{self.name}: decode returned {got}, not float32 ({num_elements},)")
        check_finite(self.name, found)
        values = output_array(num_elements, out)
        values[:] = found
        return values


def _whole(size: Any) -> int:
    if isinstance(size, bool):
        raise TypeError(f"{size} is not a whole number")
    return operator.index(size)
