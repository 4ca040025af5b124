"""A codec of a user's own, guarded: its code may raise and return anything, and costs one update."""

import operator
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from atoll.aggregation.codecs.codec import (
    CHUNK_ELEMENTS,
    FLOAT32_MAX,
    CodecBroken,
    Values,
    check_finite,
    check_size,
    check_values,
    output_array,
)
from atoll.aggregation.codecs.own_object import METHODS, is_codec
from atoll.aggregation.printable import count_of

CHUNK_BYTES_MAX = 8 * CHUNK_ELEMENTS
"""Largest size of a chunk [bytes], whatever its length: twice that of the longest plain one."""

_RAISED = (Exception, SystemExit)
"""The exceptions of a user's code; an interrupt from the keyboard is none of them."""


@dataclass(frozen=True, slots=True)
class OwnCodec:
    """A user's codec behind the contract `Codec`.

    All that its `num_bytes` and `decode` raise is a ValueError here, as of bytes that no encoder writes. It gets
    read-only values and a copy of the bytes; the values that it returns are checked and copied.
    """

    name: str
    codec: Any
    is_biased: bool
    _sizes: dict[int, int] = field(default_factory=dict, repr=False, compare=False)

    @classmethod
    def of(cls, name: str, found: Any) -> "OwnCodec":
        """Guard a user's codec.

        Args:
            name: on the wire and in errors.
            found: an object with the methods of a codec.

        Raises:
            ValueError: it is no codec.
        """
        if not is_codec(found):
            kind = f"the class {found.__name__}" if isinstance(found, type) else f"of the type {type(found).__name__}"
            raise ValueError(f"{name}: is {kind}; allowed: an object with the methods {', '.join(METHODS)}")
        try:
            is_biased = found.is_biased
        except _RAISED as error:
            raise ValueError(f"{name}: is_biased: {type(error).__name__}: {error}") from error
        if type(is_biased) is not bool:
            raise ValueError(f"{name}: is_biased is {is_biased!r}; allowed: True or False")
        return cls(name, found, is_biased)

    def num_bytes(self, num_elements: int) -> int:
        """Return the exact size of a chunk [bytes], the same in each call; 0 for no elements.

        Raises:
            ValueError: the user's code says no size, or raises.
        """
        if num_elements == 0:
            return 0
        if (known := self._sizes.get(num_elements)) is not None:
            return known
        asked = f"{self.name}: num_bytes({num_elements})"
        try:
            size = self.codec.num_bytes(num_elements)
            whole = -1 if isinstance(size, bool) else operator.index(size)
        except _RAISED as error:
            raise ValueError(f"{asked}: {type(error).__name__}: {error}") from error
        if not 1 <= whole <= CHUNK_BYTES_MAX:
            raise ValueError(f"{asked} is {size!r}; allowed: 1..{CHUNK_BYTES_MAX}")
        return self._sizes.setdefault(num_elements, whole)

    def encode(self, values: Values, rng: np.random.Generator) -> bytes:
        """Encode one chunk; see `Codec.encode`.

        Raises:
            CodecBroken: the user's code raises, or returns no bytes or another number of them.
        """
        check_values(self.name, values, FLOAT32_MAX)
        shown = values.view()
        shown.flags.writeable = False
        try:
            data = self.codec.encode(shown, rng)
        except ValueError:
            raise
        except _RAISED as error:
            raise CodecBroken(f"{self.name}: encode: {type(error).__name__}: {error}") from error
        if not isinstance(data, bytes | bytearray | memoryview):
            raise CodecBroken(f"{self.name}: encode returned an object of the type {type(data).__name__}, not bytes")
        data, size = bytes(data), self.num_bytes(values.size)
        if len(data) != size:
            of = count_of(values.size, "element")
            raise CodecBroken(f"{self.name}: encode returned {count_of(len(data), 'byte')} for {of}, not {size}")
        return data

    def decode(self, data: bytes | memoryview, num_elements: int, out: Values | None = None) -> Values:
        """Decode one chunk; see `Codec.decode`.

        Raises:
            ValueError: also when the user's code raises, or returns anything but n finite float32.
        """
        check_size(self, data, num_elements)
        try:
            found = self.codec.decode(bytes(data), num_elements)
        except _RAISED as error:
            what = str(error) if type(error) is ValueError else f"{type(error).__name__}: {error}"
            raise ValueError(f"{self.name}: decode: {what}") from error
        if not (isinstance(found, np.ndarray) and found.dtype == np.float32 and found.shape == (num_elements,)):
            is_array = isinstance(found, np.ndarray)
            got = f"{found.dtype} {found.shape}" if is_array else f"an object of the type {type(found).__name__}"
            raise ValueError(f"{self.name}: decode returned {got}, not float32 ({num_elements},)")
        check_finite(self.name, found)
        values = output_array(num_elements, out)
        values[:] = found
        return values
