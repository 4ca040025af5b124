"""The contract of a codec: one chunk of a float32 update to bytes and back. `names` lists the codecs.

A chunk is 1..65,536 consecutive elements, encoded by itself into a number of bytes that its length alone determines
(`chunks` divides tensors). Only finite values are sent: a client cannot encode NaN or infinity, a coordinator refuses
them. The result of `decode` depends on no machine, thread or library: every step of it is one correctly rounded
operation.
"""

from typing import Protocol

import numpy as np
from numpy.typing import NDArray

from atoll.ground.printable import count_of

CHUNK_ELEMENTS = 1 << 16
"""Largest number of elements of a chunk: the range of a uint16 index."""

FLOAT32_MAX = float(np.finfo(np.float32).max)

Values = NDArray[np.float32]


class CodecBroken(Exception):
    """A codec that breaks its contract while it encodes."""


class Codec(Protocol):
    """A stateless codec of chunks of n values."""

    @property
    def name(self) -> str:
        """The name in a run's TOML; `parse_codec(name)` returns an equal codec."""
        ...

    @property
    def is_biased(self) -> bool:
        """Whether the codec needs error feedback: E[decode(encode(v))] differs from v by more than a rounding."""
        ...

    def num_bytes(self, num_elements: int) -> int:
        """Return the exact size of a chunk [bytes]; 0 for no elements."""
        ...

    def encode(self, values: Values, rng: np.random.Generator) -> bytes:
        """Encode one chunk.

        Args:
            values: (n) float32, 1 <= n <= 65,536.
            rng: the only source of randomness. The number of draws depends on the chunk's length alone.

        Raises:
            ValueError: a value is not finite or beyond the codec's range, or the array is no such chunk.
        """
        ...

    def decode(self, data: bytes | memoryview, num_elements: int, out: Values | None = None) -> Values:
        """Decode one chunk to its n finite values. The bytes are untrusted.

        Args:
            data: the chunk.
            num_elements: n.
            out: (n) contiguous, the array for the values; left out: a new one. Undefined content after ValueError.

        Raises:
            ValueError: `data` has another size, or holds a value that no encoder writes and no sum can take.
        """
        ...


def is_chunk(values: Values) -> bool:
    """Return whether codecs take this array: float32, one axis, 1..65,536 elements."""
    return values.dtype == np.float32 and values.ndim == 1 and 1 <= values.size <= CHUNK_ELEMENTS


def check_values(name: str, values: Values, largest: float) -> None:
    """Raise ValueError unless this is a chunk of finite values within `largest`, before it is encoded."""
    if not is_chunk(values):
        raise ValueError(f"{name}: {values.dtype} array {values.shape} is not a chunk of 1..{CHUNK_ELEMENTS} float32")
    low, high = values.min().item(), values.max().item()
    if not -largest <= low <= high <= largest:
        raise ValueError(f"{name}: values in {low}..{high} are not within {largest}")


def check_size(codec: Codec, data: bytes | memoryview, num_elements: int) -> None:
    """Raise ValueError unless `data` has the size of a chunk of `num_elements`."""
    if not 1 <= num_elements <= CHUNK_ELEMENTS:
        raise ValueError(f"{codec.name}: chunk of {count_of(num_elements, 'element')} is not of 1..{CHUNK_ELEMENTS}")
    if len(data) != codec.num_bytes(num_elements):
        raise ValueError(
            f"{codec.name}: {count_of(len(data), 'byte')} for {count_of(num_elements, 'element')}, not "
            f"{codec.num_bytes(num_elements)}"
        )


def check_scales(name: str, scales: Values, largest: float) -> None:
    """Raise ValueError unless all scales are in 0..largest; -0 and NaN are not."""
    if np.signbit(scales).any() or not scales.max().item() <= largest:
        raise ValueError(f"{name}: a scale is not in 0..{largest}")


def check_finite(name: str, values: Values) -> None:
    """Raise ValueError unless all decoded values are finite."""
    if not -FLOAT32_MAX <= values.min().item() <= values.max().item() <= FLOAT32_MAX:
        raise ValueError(f"{name}: a value is not finite")


def output_array(num_elements: int, out: Values | None) -> Values:
    """Return `out`, or a new array for a chunk of `num_elements`."""
    return np.empty(num_elements, np.float32) if out is None else out
