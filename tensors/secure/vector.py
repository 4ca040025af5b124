"""The numbers of an update as words of a secure sum, and the sum's words as numbers.

A value u of an update of n_k examples, after the whole update was clipped to the norm C, is the word

    v = round(a u / q) mod 2^bits,    q = R / (2^(b-1) - 1),    a = n_k / examples_max, at most 1, in steps of 2^-52;
                                                                1 if all updates have the same weight

with b = 22 of 32 bits and 44 of 64, and a range R for each tensor; |v| is at most 2^(b-1) - 1, and what lies beyond
is cut to it and counted. Rounding is up or down at random, so that the mean of many has no bias; under differential
privacy it is to the nearest, after a clip to a little less than C (`rounded_clip`), so that no member adds more than
the norm C / q in steps. The sum of n words is exact while n 2^(b-1), with the noise, is below 2^(bits-1).

Ranges are R = C 2^e. The norm of an update is at most C, so no value is beyond the range while e = 0.
"""

import math
from collections.abc import Sequence
from fractions import Fraction
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from atoll.ground.printable import count_of

VALUE_BITS = {32: 22, 64: 44}
"""Bits of one member's value, with its sign, by the bits of a word."""
WORD_DTYPE: dict[int, np.dtype[Any]] = {32: np.dtype(np.uint32), 64: np.dtype(np.uint64)}
CHUNK = 1 << 16
"""Values that are encoded at once."""
UNIFORM_BITS = 32
"""Bits of the uniform numbers that decide between up and down."""
WEIGHT_BITS = 52
"""A weight is a multiple of 2^-52 from 2^-52 to 1: float64 holds it, and the sum of 64 of them is below 2^58 steps."""
SHARE_MIN, SHARE_MAX = 16.0, 2.0**41
"""Allowed standard deviations of one member's noise [steps]: from 16 on, the sum of discrete Gaussians differs from one
of the same variance by less than e^-2500 (Kairouz et al. 2021, arXiv 2102.06387); the sampler is exact up to 2^41."""
ROUNDING_MAX = 1 / 16
"""Largest share of the clip norm that rounding to the nearest may take."""
SLACK = 1e-12
SMALL = 1 / 64
"""Part of its range below which all values of a tensor are small."""
PRIVATE_EXPONENT = {32: 0, 64: 8}
"""Exponent of the range of all tensors of a private sum, by the bits of a word: it never follows from data. In words of
64 bits the grid is 2^8 times as coarse as in a plain sum, so that the exact samples of the noise reach beyond it."""
EXPONENT_MIN, EXPONENT_MAX = -24, 0
"""Least and largest exponent of a range. A range grows fourfold in a round, so that twelve rounds are the longest way
back from the least one."""


class Fill(NamedTuple):
    """How far the values of a tensor fill its range.

    Attributes:
        cut: values beyond the range.
        largest: magnitude, as a part of the range; at most 1.
    """

    cut: int
    largest: float


def step_of(bits: int, value_range: float) -> float:
    """Return q, the difference of two neighbouring values of a tensor."""
    return value_range / ((1 << VALUE_BITS[bits] - 1) - 1)


def fault_of(bits: int, members: int, noise_steps: float = 0.0) -> str:
    """Return why the sum of `members` values could overflow; empty: it cannot.

    Args:
        bits: of a word.
        members: most of a session.
        noise_steps: ten standard deviations of the noise that members add together [steps].
    """
    largest, most = members * ((1 << VALUE_BITS[bits] - 1) - 1) + noise_steps, 1 << bits - 1
    return (
        ""
        if largest < most
        else f"{count_of(members, 'member')} in words of {bits} bits: the sum is up to {largest:.3g} steps, "
        f"and a word holds {most - 1:.3g}"
    )


def fault_of_noise(bits: int, members: int, share: float) -> str:
    """Return why the noise of a private sum cannot be drawn or added; empty: it can.

    Args:
        bits: of a word.
        members: most of a session.
        share: standard deviation of one member's noise [steps].
    """
    if not SHARE_MIN <= share <= SHARE_MAX:
        allowed = f"{SHARE_MIN:g} to {SHARE_MAX:.4g}"
        return f"one member's noise has a standard deviation of {share:.4g}, in steps, not {allowed}"
    return fault_of(bits, members, 10.0 * share * math.sqrt(members))


def clip_factor(norm: float, clip_norm: float) -> float:
    """Return the factor that clips an update: C / max(norm, C), which leaves a zero update as it is.

    Raises:
        ValueError: the norm is not finite: min(1, C / NaN) would be 1.
    """
    if not math.isfinite(norm):
        raise ValueError(f"the norm of the update is {norm}")
    return clip_norm / max(norm, clip_norm)


def rounded_clip(clip_norm: float, step: float, num_values: int) -> float:
    """Return C', to which an update is clipped so that its values, rounded to the nearest step, have a norm within C.

        C' = (C - step sqrt(values) / 2) (1 - 10^-12)

    Rounding makes an update longer by at most step sqrt(values) / 2; the last factor is for the rounding in float64 of
    its norm and of the products.

    Raises:
        ValueError: rounding would take more than `ROUNDING_MAX` of the clip norm.
    """
    rounding = step * math.sqrt(num_values) / 2.0
    if rounding > ROUNDING_MAX * clip_norm:
        raise ValueError(
            f"updates of {count_of(num_values, 'number')}, clipped to {clip_norm:g}, are too fine for the grid of "
            f"their noise, steps of {step:.3g}: allowed is a smaller noise multiplier"
        )
    return (clip_norm - rounding) * (1.0 - SLACK)


def clip_steps(bits: int) -> float:
    """Return the clip norm in steps of a private sum: C / q."""
    return math.ldexp((1 << VALUE_BITS[bits] - 1) - 1, -PRIVATE_EXPONENT[bits])


def share_of_noise(bits: int, noise_multiplier: float, honest_min: int) -> float:
    """Return the standard deviation of one member's share of the noise [steps]: z C / (q sqrt(h)), never below it.

    The shares of h honest members have together the variance (z C / q)^2, which a guarantee needs.

    Args:
        bits: of a word.
        noise_multiplier: z.
        honest_min: h, fewest honest members of a sum.
    """
    return noise_multiplier * clip_steps(bits) / math.sqrt(honest_min) * (1.0 + 2.0**-50)  # three roundings


def weight_of(num_examples: float, examples_max: float) -> int:
    """Return the weight a of an update [2^-52].

    The words of its values are made with this very number, so that the mean divides by what they were multiplied with.

    Args:
        num_examples: n_k > 0.
        examples_max: the number with weight 1; 0: every update has weight 1.
    """
    if not examples_max:
        return 1 << WEIGHT_BITS
    part = Fraction(num_examples) / Fraction(examples_max)
    return max(1, min(1 << WEIGHT_BITS, round(part * (1 << WEIGHT_BITS))))


def fill_of(magnitude: float, factor: float, bits: int, value_range: float) -> Fill:
    """Return how far a tensor's values fill its range, from the largest magnitude; `cut` counts at most one.

    It agrees with what `encode` finds.
    """
    most = (1 << VALUE_BITS[bits] - 1) - 1
    reach = float(np.float64(magnitude) * (factor / step_of(bits, value_range)))
    return Fill(int(reach > most), min(1.0, reach / most))


def ranges_of(clip_norm: float, exponents: Sequence[int]) -> tuple[float, ...]:
    """Return the range of each float tensor: C 2^e."""
    return tuple(math.ldexp(clip_norm, exponent) for exponent in exponents)


def encode(
    values: NDArray[Any],
    factor: float,
    bits: int,
    value_range: float,
    uniforms: NDArray[np.uint32] | None,
    most: int | None = None,
) -> tuple[NDArray[Any], Fill]:
    """Return values as words.

    Args:
        values: finite floats of one tensor, or of a box of it; any shape.
        factor: a times the clip factor.
        bits: of a word.
        value_range: R of the tensor.
        uniforms: a secret uniform word for each value, which decides between up and down; None: to the nearest.
        most: largest magnitude of a word; None: 2^(b-1) - 1.

    Returns:
        The words, in the shape of the values, and how far they fill the range.

    Raises:
        ValueError: a value is not finite.
    """
    dtype = WORD_DTYPE[bits]
    most = (1 << VALUE_BITS[bits] - 1) - 1 if most is None else most
    words = np.empty(values.shape, dtype)
    flat, out = np.ascontiguousarray(values).reshape(-1), words.reshape(-1)
    signed = out.view(np.dtype(f"i{dtype.itemsize}"))
    scale = np.float64(factor / step_of(bits, value_range))
    room, drawn = np.empty((2, min(flat.size, CHUNK)))
    cut, largest = 0, 0.0
    for at in range(0, flat.size, CHUNK):
        part = flat[at : at + CHUNK]
        reach = float(max(part.max(), -part.min()) * scale)
        if not math.isfinite(reach):
            raise ValueError("a value of the update is not finite")
        largest = max(largest, min(1.0, reach / most))
        steps = np.multiply(part, scale, out=room[: part.size])
        if reach > most:
            cut += int(np.count_nonzero(np.abs(steps) > most))
        if uniforms is None:
            np.rint(steps, out=steps)
        else:
            steps += np.multiply(uniforms[at : at + CHUNK], 2.0**-UNIFORM_BITS, out=drawn[: part.size])
            np.floor(steps, out=steps)
        if reach >= most:
            np.clip(steps, -most, most, out=steps)
        signed[at : at + CHUNK] = steps  # whole numbers within the words
    return words, Fill(cut, largest)


def decode(words: NDArray[Any], bits: int, value_range: float) -> NDArray[np.float64]:
    """Return the sum that words stand for: sum of a u over the members, to within n q."""
    signed = words.view(np.dtype(f"i{bits // 8}"))
    return signed.astype(np.float64) * step_of(bits, value_range)


def next_exponent(exponent: int, members: int, cut: int, small: int) -> int:
    """Return the exponent e of a tensor's range for the next round, by what members of a committed one have counted.

    Args:
        exponent: e.
        members: of the sum.
        cut: members with a value beyond the range.
        small: members with values other than 0, all below 1/64 of the range: a tensor that did not move keeps its
            range, for when it does.
    """
    if cut:
        return min(EXPONENT_MAX, exponent + 2)
    return max(EXPONENT_MIN, exponent - 3) if members and small == members else exponent
