"""Codecs that transmit every element in fewer bits: bf16, fp16, qsgd8 and sign."""

import struct
from dataclasses import dataclass
from typing import ClassVar

import numpy as np
from numpy.typing import NDArray

from atoll.tensors.codecs.codec import (
    FLOAT32_MAX,
    Values,
    check_finite,
    check_scales,
    check_size,
    check_values,
    is_chunk,
    output_array,
)
from atoll.tensors.codecs.kernels import loops_for
from atoll.tensors.safetensors_file import to_float32

BUCKET_ELEMENTS = 512  # also in the loops of `kernels`
"""Number of elements that share a norm in `Qsgd`: as in the paper's experiments."""


@dataclass(frozen=True, slots=True)
class BFloat16:
    """The upper half of a float32, rounded to nearest, ties to even: |C(v) - v| <= 2^-8 |v| for normal v.

    Values that would round to infinity (from 3.396e38 on) are refused, not saturated.
    """

    name: ClassVar[str] = "bf16"
    is_biased: ClassVar[bool] = False
    largest_bits: ClassVar[int] = 0x7F7F7FFF
    largest: ClassVar[float] = float(np.uint32(largest_bits).view(np.float32))

    def num_bytes(self, num_elements: int) -> int:
        """Return 2 n [bytes]."""
        return 2 * num_elements

    def encode(self, values: Values, rng: np.random.Generator) -> bytes:
        """Encode one chunk; see `Codec.encode`."""
        if is_chunk(values) and (loops := loops_for(values.size)) is not None:
            values, halves = np.ascontiguousarray(values), np.empty(values.size, np.uint16)
            if loops.encode_bf16(values.view(np.uint32), halves) <= self.largest_bits:
                return halves.tobytes()
        check_values(self.name, values, self.largest)
        bits = values.view(np.uint32)
        rounded = bits >> np.uint32(16)
        rounded &= np.uint32(1)
        rounded += np.uint32(0x7FFF)  # and one more when the last bit that stays is odd
        rounded += bits
        rounded >>= np.uint32(16)
        return rounded.astype("<u2").tobytes()

    def decode(self, data: bytes | memoryview, num_elements: int, out: Values | None = None) -> Values:
        """Decode one chunk; see `Codec.decode`."""
        check_size(self, data, num_elements)
        raw, values = _aligned(np.frombuffer(data, "<u2")), output_array(num_elements, out)
        if (loops := loops_for(num_elements)) is not None:
            if loops.decode_bf16(raw, values.view(np.uint32)) < 0x7F80:
                return values
        else:
            values[:] = to_float32(raw, "BF16")
        check_finite(self.name, values)
        return values


@dataclass(frozen=True, slots=True)
class Float16:
    """IEEE half precision, rounded to nearest, ties to even: |C(v) - v| <= max(2^-11 |v|, 2^-25).

    Values that would round to infinity (from 65,520 on) are refused, not saturated: saturation would clip an update
    without a message, while bf16 takes such values. Values up to 2^-25 become 0, and below 2^-14, where many elements
    of an update lie, digits are lost: bf16 keeps its 8 bits there.
    """

    name: ClassVar[str] = "fp16"
    is_biased: ClassVar[bool] = False
    largest: ClassVar[float] = float(np.nextafter(np.float32(65520), np.float32(0)))
    largest_bits: ClassVar[int] = int(np.float32(largest).view(np.uint32))

    def num_bytes(self, num_elements: int) -> int:
        """Return 2 n [bytes]."""
        return 2 * num_elements

    def encode(self, values: Values, rng: np.random.Generator) -> bytes:
        """Encode one chunk; see `Codec.encode`."""
        if is_chunk(values) and (loops := loops_for(values.size)) is not None:
            values, halves = np.ascontiguousarray(values), np.empty(values.size, np.uint16)
            if loops.encode_fp16(values.view(np.uint32), values, halves) <= self.largest_bits:
                return halves.tobytes()
        check_values(self.name, values, self.largest)
        return half_bits(values).tobytes()

    def decode(self, data: bytes | memoryview, num_elements: int, out: Values | None = None) -> Values:
        """Decode one chunk; see `Codec.decode`."""
        check_size(self, data, num_elements)
        raw, values = _aligned(np.frombuffer(data, "<u2")), output_array(num_elements, out)
        if (loops := loops_for(num_elements)) is not None and loops.decode_fp16(raw, values) < 0x7C00:
            return values
        values[:] = to_float32(raw.view("<f2"), "F16")
        check_finite(self.name, values)
        return values


def half_bits(values: Values) -> NDArray[np.uint16]:
    """Return the bits of `values.astype(float16)`, in half the time of numpy, which rounds value by value.

    A half keeps 11 of the 24 bits of a float32. Added to |v|, the power of two 2^13 above v's own (at least above
    2^-14, where subnormal halves begin) shifts the other 13 out: float32's own addition rounds to nearest even. The sum
    has gained a count of the half's units, 1,024..2,048 for a normal half, and the half is that count added to its
    exponent's field; a count of 2,048 carries into the next exponent by itself.

    Args:
        values: (n) float32 with |v| < 65,520.
    """
    bits = values.view(np.uint32)
    power = bits & np.uint32(0x7F800000)
    np.maximum(power, np.uint32(113 << 23), out=power)
    power += np.uint32(13 << 23)
    half = (np.abs(values) + power.view(np.float32)).view(np.uint32)
    half -= power
    power >>= np.uint32(13)
    half += power
    half -= np.uint32((113 + 13) << 10)
    sign = bits >> np.uint32(16)
    sign &= np.uint32(0x8000)
    half |= sign
    return half.astype("<u2")


@dataclass(frozen=True, slots=True)
class Qsgd:
    """Stochastic rounding to s = 127 steps of each bucket's Euclidean norm.

        r_i  = s v_i / N                       N = ||v||_2 of the bucket of 512, as a float32
        l_i  = floor(r_i + u_i)                u_i uniform in [0, 1): the paper's sign(v_i) (floor|r_i| or one more)
        C(v) = l N / s                         0 when N = 0

    Unbiased: |E[C(v)_i] - v_i| <= 2^-22 |v_i| + 2^-17 N / s: four roundings, and the resolution of u.
    Variance (N / s)^2 sum_i f_i (1 - f_i) with f_i = frac|r_i|, at most min(d / s^2, sqrt(d) / s) N^2 for d = 512.

    Source:
        Alistarh et al., "QSGD: Communication-Efficient SGD via Gradient Quantization and Encoding", NeurIPS 2017,
        section 3.1, with the buckets of its experiments. Without its entropy code: no size may depend on values.
    """

    name: ClassVar[str] = "qsgd8"
    is_biased: ClassVar[bool] = False
    levels: ClassVar[int] = 127  # fills an int8
    largest_norm: ClassVar[float] = 2.0**127  # so that s (N / s) is finite in float32, whatever its rounding

    def num_bytes(self, num_elements: int) -> int:
        """Return 4 for each bucket and 1 for each element [bytes]."""
        return 4 * _num_buckets(num_elements) + num_elements

    def encode(self, values: Values, rng: np.random.Generator) -> bytes:
        """Encode one chunk; see `Codec.encode`."""
        check_values(self.name, values, FLOAT32_MAX)
        rows = _in_buckets(values)
        exact = np.sqrt(np.square(rows, dtype=np.float64).sum(axis=1))
        if exact.max() > self.largest_norm:
            raise ValueError(f"qsgd8: norm {exact.max()} of a bucket is above {self.largest_norm}")
        norms: Values = exact.astype("<f4")
        levels = stochastic_levels(rows, norms, count=self.levels, rng=rng)
        return norms.tobytes() + levels.reshape(-1)[: values.size].tobytes()

    def decode(self, data: bytes | memoryview, num_elements: int, out: Values | None = None) -> Values:
        """Decode one chunk; see `Codec.decode`."""
        check_size(self, data, num_elements)
        num_buckets = _num_buckets(num_elements)
        norms = np.frombuffer(data, "<f4", count=num_buckets)
        levels = np.frombuffer(data, np.int8, offset=4 * num_buckets)
        check_scales(self.name, norms, self.largest_norm)
        scales, values = norms / np.float32(self.levels), output_array(num_elements, out)
        loops = loops_for(num_elements)
        if loops is not None and loops.scale_levels(levels, scales, values) >= -self.levels:
            return values
        if levels.min() < -self.levels:
            raise ValueError(f"qsgd8: level {levels.min()} is not in {-self.levels}..{self.levels}")
        values[:] = levels
        whole = num_elements // BUCKET_ELEMENTS * BUCKET_ELEMENTS
        values[:whole].reshape(-1, BUCKET_ELEMENTS)[:] *= scales[: whole // BUCKET_ELEMENTS, np.newaxis]
        values[whole:] *= scales[-1]
        return values


def stochastic_levels(rows: Values, norms: Values, *, count: int, rng: np.random.Generator) -> NDArray[np.int8]:
    """Return the levels l of `Qsgd` for b buckets.

    r is in fixed point with 16 fraction bits, u has 16 bits: a value too small to count ever is below 2^-17 N / s, the
    resolution of N itself in float32. No |v_i| is above its norm, so |r| <= s <= 127 and nothing overflows. A shift to
    the right is the floor.

    Args:
        rows: (b, d) values of each bucket, d a multiple of 4.
        norms: (b) at least the largest magnitude of the bucket: the Euclidean norm, also when rounded to float32.
        count: s, in 1..127.
        rng: draws b d / 4 words of 64 bits.
    """
    dither = rng.integers(0, 1 << 64, size=rows.size // 4, dtype=np.uint64).view(np.uint16)
    if rows.shape[1] == BUCKET_ELEMENTS and (loops := loops_for(rows.size)) is not None:
        found = np.empty(rows.shape, np.int8)
        loops.stochastic_levels(rows.reshape(-1), norms, np.float32(count << 16), dither, found.reshape(-1))
        return found
    ratios = rows / np.where(norms > 0, norms, np.float32(1))[:, np.newaxis]
    ratios *= np.float32(count << 16)
    levels = np.rint(ratios, out=ratios).astype(np.int32)
    levels += dither.reshape(rows.shape)
    levels >>= 16
    return levels.astype(np.int8)


@dataclass(frozen=True, slots=True)
class Sign:
    """The signs of a chunk and one scale: C(v) = (||v||_1 / n) sign(v), with sign(0) = +1.

    A contraction: ||C(v) - v||^2 = (1 - delta) ||v||^2 with delta = ||v||_1^2 / (n ||v||_2^2). Biased.

    Source:
        Karimireddy et al., "Error Feedback Fixes SignSGD and other Gradient Compression Schemes", ICML 2019,
        Algorithm 1 (EF-signSGD).
    """

    name: ClassVar[str] = "sign"
    is_biased: ClassVar[bool] = True

    def num_bytes(self, num_elements: int) -> int:
        """Return 4 for the scale and 1 for every 8 elements [bytes]."""
        return 4 + -(-num_elements // 8) if num_elements else 0

    def encode(self, values: Values, rng: np.random.Generator) -> bytes:
        """Encode one chunk; see `Codec.encode`."""
        check_values(self.name, values, FLOAT32_MAX)
        scale = np.abs(values).sum(dtype=np.float64) / values.size
        return struct.pack("<f", scale) + np.packbits(values < 0, bitorder="little").tobytes()

    def decode(self, data: bytes | memoryview, num_elements: int, out: Values | None = None) -> Values:
        """Decode one chunk; see `Codec.decode`."""
        check_size(self, data, num_elements)
        scale = np.frombuffer(data, "<f4", count=1)
        packed = np.frombuffer(data, np.uint8, offset=4)
        check_scales(self.name, scale, FLOAT32_MAX)
        padding = -num_elements % 8
        if int(packed[-1]) >> (8 - padding):
            raise ValueError(f"sign: padding behind element {num_elements - 1} is not 0")
        values = output_array(num_elements, out)
        if padding:
            values[:] = (_SIGNS * scale).take(packed, axis=0).reshape(-1)[:num_elements]
        else:  # `clip` skips the check of an index that cannot be out of range
            (_SIGNS * scale).take(packed, axis=0, out=values.reshape(-1, 8), mode="clip")
        return values


_BYTES = np.arange(256, dtype=np.uint8)[:, np.newaxis]
_SIGNS = 1 - 2 * np.unpackbits(_BYTES, axis=1, bitorder="little").astype(np.float32)  # (256, 8): a sign for each bit


def _aligned(raw: NDArray[np.uint16]) -> NDArray[np.uint16]:
    return raw if raw.flags.aligned else raw.copy()


def _num_buckets(num_elements: int) -> int:
    return -(-num_elements // BUCKET_ELEMENTS)


def _in_buckets(values: Values) -> Values:
    """Return (n) as rows of 512, the last one padded with zeros; the same memory if no padding is needed."""
    padding = -values.size % BUCKET_ELEMENTS
    filled = np.concatenate([values, np.zeros(padding, np.float32)]) if padding else values
    return filled.reshape(-1, BUCKET_ELEMENTS)
