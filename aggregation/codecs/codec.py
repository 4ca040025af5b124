"""The contract of a codec: one chunk of a float32 update to bytes and back. The codecs themselves: `codecs`.

A chunk is 1..65,536 consecutive elements, coded by itself into a number of bytes that its length alone decides
(`chunks` cuts tensors). Only finite values travel: a client cannot encode others, a coordinator refuses them. What
`decode` gives depends on no machine, thread or library: every step of it is one correctly rounded operation.
"""

from typing import Protocol

import numpy as np
from numpy.typing import NDArray

CHUNK_ELEMENTS = 1 << 16
"""Most elements of a chunk: as many as a uint16 can index."""

FLOAT32_MAX = float(np.finfo(np.float32).max)

Values = NDArray[np.float32]


class Codec(Protocol):
    """Turns one chunk of n values into bytes and back; it holds no state."""

    @property
    def name(self) -> str:
        """As in a run's TOML; `parse_codec(name)` is this codec again."""
        ...

    @property
    def is_biased(self) -> bool:
        """Whether it needs error feedback: E[decode(encode(v))] differs from v by more than a rounding."""
        ...

    def num_bytes(self, num_elements: int) -> int:
        """The exact size of a chunk [bytes]; 0 of no elements."""
        ...

    def encode(self, values: Values, rng: np.random.Generator) -> bytes:
        """One chunk.

        Args:
            values: (n) float32, 1 <= n <= 65,536.
            rng: the only source of randomness. A chunk draws from it what its length alone decides.

        Raises:
            ValueError: a value is not finite or beyond the codec's range, or the array is not such a chunk.
        """
        ...

    def decode(self, data: bytes | memoryview, num_elements: int, out: Values | None = None) -> Values:
        """The n finite values of a chunk. The bytes are a stranger's: nothing about them is trusted.

        Args:
            data: the chunk.
            num_elements: n.
            out: (n) contiguous, where the values are put; left out: in a new array. Spoilt when ValueError is raised.

        Raises:
            ValueError: `data` has another size, or holds what no encoder writes and no sum can take.
        """
        ...


def is_chunk(values: Values) -> bool:
    """Whether the array is of the kind that codecs take."""
    return values.dtype == np.float32 and values.ndim == 1 and 1 <= values.size <= CHUNK_ELEMENTS


def check_values(name: str, values: Values, largest: float) -> None:
    """Raise ValueError unless this is a chunk of finite values within `largest`, before it is encoded."""
    if not is_chunk(values):
        raise ValueError(f"{name}: {values.dtype} array {values.shape} is not a chunk of 1..{CHUNK_ELEMENTS} float32")
    low, high = values.min().item(), values.max().item()
    if not -largest <= low <= high <= largest:
        raise ValueError(f"{name}: values in {low}..{high} are not within {largest}")


def check_size(codec: Codec, data: bytes | memoryview, num_elements: int) -> None:
    """Raise ValueError unless `data` has the size of a chunk of so many elements."""
    if not 1 <= num_elements <= CHUNK_ELEMENTS:
        raise ValueError(f"{codec.name}: chunk of {num_elements} elements is not of 1..{CHUNK_ELEMENTS}")
    if len(data) != codec.num_bytes(num_elements):
        raise ValueError(
            f"{codec.name}: {len(data)} bytes for {num_elements} elements, not {codec.num_bytes(num_elements)}"
        )


def check_scales(name: str, scales: Values, largest: float) -> None:
    """Raise ValueError unless all are in 0..largest; -0 and NaN are not."""
    if np.signbit(scales).any() or not scales.max().item() <= largest:
        raise ValueError(f"{name}: a scale is not in 0..{largest}")


def check_finite(name: str, values: Values) -> None:
    """Raise ValueError unless all decoded values are finite."""
    if not -FLOAT32_MAX <= values.min().item() <= values.max().item() <= FLOAT32_MAX:
        raise ValueError(f"{name}: a value is not finite")


def room_for(num_elements: int, out: Values | None) -> Values:
    """Where a chunk of so many elements is decoded to."""
    return np.empty(num_elements, np.float32) if out is None else out
