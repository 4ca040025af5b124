"""The rule for integer tensors: buffers such as a batch norm's `num_batches_tracked`.

    new = base + round_half_even(sum_k w_k u_k / W)

Exact: in int64 where it provably cannot overflow, else in Python's integers. Both give the same numbers. A value that
leaves its dtype is an error, never clamped.
"""

from collections.abc import Iterable
from typing import Any

import numpy as np
from numpy.typing import NDArray

INT64_SAFE = 1 << 62
"""Bound on W M below which no partial sum and no remainder overflows int64."""


def sum_dtype(magnitude: int, *, total_weight: int) -> type[Any]:
    """Return np.int64 if W M <= 2^62, else object: Python's integers.

    Up to that bound no |partial sum| and no remainder overflows int64.
    """
    return np.int64 if max(magnitude, 1) * total_weight <= INT64_SAFE else object


def weighted_sum(
    blocks: Iterable[tuple[NDArray[np.int64], int]], num_elements: int, *, dtype: type[Any]
) -> NDArray[Any]:
    """Return sum_k w_k u_k of (u_k, w_k) blocks of (num_elements), in `dtype` of `sum_dtype`."""
    total = np.zeros(num_elements, dtype)
    for block, weight in blocks:
        total += block.astype(dtype, copy=False) * weight
    return total


WORD_BITS = 62
"""Number of bits of each word, except the highest, in which a sum beyond int64 is sent."""


def to_words(total: NDArray[Any]) -> NDArray[np.int64]:
    """Return a sum (n >= 1) as int64: (n) itself, or (words, n) of Python's integers, the lowest first.

    The highest word has the sign; there are as many as the largest integer needs.
    """
    if total.dtype == np.int64:
        return total
    num_words = int(abs(total).max()).bit_length() // WORD_BITS + 1
    words = np.empty((num_words, total.size), np.int64)
    for index in range(num_words - 1):
        words[index] = (total & ((1 << WORD_BITS) - 1)).astype(np.int64)
        total = total >> WORD_BITS
    words[-1] = total.astype(np.int64)
    return words


def from_words(words: NDArray[np.int64], num_elements: int, *, dtype: type[Any]) -> NDArray[Any]:
    """Return the sum that `to_words` gave, from words of any shape."""
    if dtype is np.int64:
        return words
    total: NDArray[Any] = np.zeros(num_elements, object)
    for word in words.reshape(-1, num_elements)[::-1]:
        total = (total << WORD_BITS) + word.astype(object)
    return total


def rounded_mean(total: NDArray[Any], *, total_weight: int) -> NDArray[Any]:
    """Return round_half_even(total / W) of integers, exactly.

    Floor division leaves 0 <= r < W; the quotient rounds up if r > W - r, or if r == W - r and it is odd.
    """
    quotient, rest = total // total_weight, total % total_weight
    other = total_weight - rest
    is_up = (rest > other) | ((rest == other) & (quotient % 2 == 1))
    rounded: NDArray[Any] = quotient + is_up.astype(quotient.dtype)
    return rounded


def apply_mean(base: NDArray[np.int64], mean: NDArray[Any], dtype: np.dtype[Any]) -> NDArray[Any]:
    """Return base + mean in the tensor's dtype, of (n) elements, n >= 1.

    Raises:
        ValueError: an element leaves the dtype.
    """
    info = np.iinfo(dtype)
    largest = max(int(base.max()), -int(base.min())) + max(int(mean.max()), -int(mean.min()))
    exact = base.astype(object) + mean if largest > INT64_SAFE else base + mean
    for value in (int(exact.min()), int(exact.max())):
        if not info.min <= value <= info.max:
            raise ValueError(f"value {value} is not in {info.min}..{info.max} of {dtype.name}")
    new: NDArray[Any] = exact.astype(dtype)
    return new
