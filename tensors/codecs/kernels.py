"""The inner loops of the codecs, compiled by numba if it is installed; without it numpy gives the same bits.

numpy makes three to eight passes over a chunk; a loop makes one, which also checks the values. Every step is an integer
operation or one correctly rounded one of float32, so not one bit differs; a test holds them together. (Each sum is cut
to 32 bits again: numba would continue with 64, at half the speed.)
"""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import numpy as np

from atoll.tensors.numba_support import Meter

u16, u32, f32 = np.uint16, np.uint32, np.float32
FLOAT32_MAX = np.finfo(np.float32).max


def encode_bf16(bits: Any, out: Any) -> Any:
    """Round the bits of float32 values to uint16; return the largest bits without their sign."""
    largest = u32(0)
    for i in range(bits.size):
        largest = max(largest, bits[i] & u32(0x7FFFFFFF))
        odd = (bits[i] >> u32(16)) & u32(1)
        out[i] = u16((bits[i] + u32(0x7FFF) + odd) >> u32(16))
    return largest


def decode_bf16(raw: Any, out: Any) -> Any:
    """Turn uint16 into the bits of float32 values; return the largest raw value without its sign."""
    largest = u16(0)
    for i in range(raw.size):
        largest = max(largest, u16(raw[i] & u16(0x7FFF)))
        out[i] = u32(raw[i]) << u32(16)
    return largest


def encode_fp16(bits: Any, values: Any, out: Any) -> Any:
    """Compute `quantization.half_bits` of float32 values and their bits; return the largest bits without their sign."""
    largest = u32(0)
    for i in range(bits.size):
        largest = max(largest, bits[i] & u32(0x7FFFFFFF))
        power = u32(max(bits[i] & u32(0x7F800000), u32(113 << 23)) + u32(13 << 23))
        pushed = f32(abs(values[i]) + power.view(f32)).view(u32)
        half = pushed - power + (power >> u32(13)) - u32((113 + 13) << 10)
        out[i] = u16(half | ((bits[i] >> u32(16)) & u32(0x8000)))
    return largest


def decode_fp16(raw: Any, out: Any) -> Any:
    """Turn finite halves, as uint16, into float32; return the largest raw value without its sign.

    A subnormal half, m 2^-24, is 2^-14 (1 + m/1024) less 2^-14: both are exact, and neither is a subnormal float32,
    which some processes have set to count as 0.
    """
    largest = u16(0)
    for i in range(raw.size):
        half = u32(raw[i])
        largest = max(largest, u16(raw[i] & u16(0x7FFF)))
        bits = u32((half & u32(0x7FFF)) << u32(13))
        subnormal = f32(u32(bits + u32(113 << 23)).view(f32) - f32(2.0**-14)).view(u32)
        magnitude = u32(bits + u32(112 << 23)) if half & u32(0x7C00) else subnormal
        out[i] = u32(magnitude | ((half & u32(0x8000)) << u32(16))).view(f32)
    return largest


def stochastic_levels(values: Any, norms: Any, factor: Any, dither: Any, out: Any) -> Any:
    """Compute `quantization.stochastic_levels` of buckets of 512."""
    for b in range(norms.size):
        norm, begin, end = norms[b] if norms[b] > 0 else f32(1), b * 512, (b + 1) * 512
        row, noise, into = values[begin:end], dither[begin:end], out[begin:end]
        for i in range(row.size):
            ratio = f32(f32(row[i] / norm) * factor)
            into[i] = np.int8(np.int32(np.int32(np.rint(ratio)) + np.int32(noise[i])) >> np.int32(16))
    return 0


def scale_levels(levels: Any, scales: Any, out: Any) -> Any:
    """Multiply int8 levels by the scale of their bucket of 512; return the least level."""
    least = np.int8(0)
    for b in range(scales.size):
        scale, begin, end = scales[b], b * 512, (b + 1) * 512
        row, into = levels[begin:end], out[begin:end]
        for i in range(row.size):
            least = min(least, row[i])
            into[i] = f32(row[i]) * scale
    return least


def scatter(values: Any, indices: Any, out: Any) -> Any:
    """Set the values at their indices, and 0 elsewhere; return the number of valid ones before the first fault.

    A value is valid if it is finite, and its index above the one before it.
    """
    out[:] = f32(0)
    first: Any = 0
    for i in range(values.size):
        index = np.int64(indices[i])
        if index < first or index >= out.size or not abs(values[i]) <= FLOAT32_MAX:
            return i
        out[index] = values[i]
        first = index + 1
    return values.size


Loop = Callable[..., Any]


@dataclass(frozen=True, slots=True)
class Loops:
    """The inner loops of the codecs in machine code."""

    encode_bf16: Loop
    decode_bf16: Loop
    encode_fp16: Loop
    decode_fp16: Loop
    stochastic_levels: Loop
    scale_levels: Loop
    scatter: Loop


def compiled() -> Loops:
    """Return the codecs' loops in machine code, compiled at their first use, and read from a file afterwards."""
    from numba import float32, int8, int64, njit, types, uint16, uint32

    def loop(function: Loop, *signature: Any) -> Loop:
        jitted: Loop = njit(int64(*signature), nogil=True, cache=True)(function)
        return jitted

    def read(item: Any) -> Any:
        return types.Array(item, 1, "C", readonly=True)

    return Loops(
        loop(encode_bf16, read(uint32), uint16[::1]),
        loop(decode_bf16, read(uint16), uint32[::1]),
        loop(encode_fp16, read(uint32), read(float32), uint16[::1]),
        loop(decode_fp16, read(uint16), float32[::1]),
        loop(stochastic_levels, read(float32), read(float32), float32, read(uint16), int8[::1]),
        loop(scale_levels, read(int8), read(float32), float32[::1]),
        loop(scatter, read(float32), read(uint16), float32[::1]),
    )


loops_for = Meter(compiled).loops
"""(number of elements of a chunk) -> the loops, or None while numpy works (`numba_support.Meter`)."""
