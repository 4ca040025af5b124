"""Statistics of a tensor's values, gathered in one pass: the largest magnitude, the sum of squares, the faults.

For float values numba makes one pass if it is installed and the data are large; numpy makes four, with the same bits:
squares are doubles, summed in `LANES` lanes, each in the order of the values, and the lanes as numpy sums them.
"""

import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from atoll.tensors.codecs.names import parse_codec
from atoll.tensors.layout import FLOATS
from atoll.tensors.numba_support import Meter
from atoll.tensors.safetensors_file import to_float32

LANES = 512
"""Number of lanes, enough for a processor's full rate of additions: value i is in lane i mod LANES."""

BYTES_MAX = 256 * LANES
"""Number of integers of one byte whose squares float32 adds exactly: 256 in a lane are less than 2^24."""

Look = Callable[[NDArray[np.float32], NDArray[np.float64]], np.uint32]
"""(values, lanes) -> the largest bits of a value without its sign; the squares are added to the lanes."""


@dataclass(slots=True)
class Tally:
    """The statistics of one tensor so far."""

    magnitude: float | int
    non_finite: int = 0
    squared_norm: float = 0.0
    malformed: str = ""
    """The first chunk that its codec refuses, and the reason."""

    def add_chunk(self, codec: str, chunk: memoryview, num_elements: int) -> None:
        """Count the decoded values of a chunk, unless an earlier chunk of the tensor was malformed."""
        if self.malformed:
            return
        try:
            self.add(parse_codec(codec).decode(chunk, num_elements), "F32")
        except ValueError as fault:
            self.malformed = str(fault)

    def add(self, raw: NDArray[Any], dtype: str) -> None:
        """Add raw values to the statistics; NaN and infinite values are only counted."""
        if dtype not in FLOATS:
            self._count(max(-raw.min().item(), raw.max().item()), _lanes_of(raw))
            return
        values = to_float32(raw, dtype)
        magnitude, lanes = look(values)
        if not math.isfinite(magnitude):
            finite = values[np.isfinite(values)]
            self.non_finite += values.size - finite.size
            magnitude, lanes = look_by_numpy(finite) if finite.size else (0.0, np.zeros(LANES))
        self._count(magnitude, lanes)

    def _count(self, magnitude: float | int, lanes: NDArray[np.float64]) -> None:
        self.magnitude = max(self.magnitude, magnitude)
        self.squared_norm += float(lanes.sum())


def look(values: NDArray[np.float32]) -> tuple[float, NDArray[np.float64]]:
    """Return the largest magnitude, which is not finite where a value is not, and the squares by lane.

    Args:
        values: (n), n >= 1.
    """
    if (loop := loop_for(values.size)) is None:
        return look_by_numpy(values)
    lanes = np.zeros(LANES)
    largest = loop(values, lanes)
    return float(np.uint32(largest).view(np.float32)), lanes


def look_by_numpy(values: NDArray[np.float32]) -> tuple[float, NDArray[np.float64]]:
    """Compute `look` with numpy."""
    return max(-values.min().item(), values.max().item()), _lanes_of(values)


def _lanes_of(values: NDArray[Any]) -> NDArray[np.float64]:
    is_exact = values.dtype.itemsize == 1 and values.size <= BYTES_MAX
    with np.errstate(invalid="ignore"):  # a signalling NaN is counted as NaN, by its magnitude
        squares: NDArray[np.floating[Any]] = values.astype(np.float32 if is_exact else np.float64)
    np.square(squares, out=squares)
    whole = squares.size - squares.size % LANES
    lanes: NDArray[np.float64] = squares[:whole].reshape(-1, LANES).sum(axis=0).astype(np.float64)
    lanes[: squares.size - whole] += squares[whole:]
    return lanes


def compiled() -> Look:
    """Return the loop in machine code; it is compiled at its first use on a machine, and read from a file later."""
    from numba import float32, float64, njit, types, uint32

    @njit(uint32(types.Array(float32, 1, "C", readonly=True), float64[::1]), nogil=True, cache=True)
    def loop(values: Any, lanes: Any) -> Any:
        bits, largest = values.view(np.uint32), np.uint32(0)
        whole = values.size - values.size % LANES
        for begin in range(0, whole, LANES):
            for lane in range(LANES):
                largest = max(largest, bits[begin + lane] & np.uint32(0x7FFFFFFF))
            for lane in range(LANES):
                lanes[lane] += np.float64(values[begin + lane]) * np.float64(values[begin + lane])
        for lane in range(values.size - whole):
            largest = max(largest, bits[whole + lane] & np.uint32(0x7FFFFFFF))
            lanes[lane] += np.float64(values[whole + lane]) * np.float64(values[whole + lane])
        return largest

    look: Look = loop
    return look


loop_for = Meter(compiled).loops
"""(number of values) -> the loop, or None while numpy works (`numba_support.Meter`)."""
