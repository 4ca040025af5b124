"""The numbers that a secure sum adds exactly, as words of 64 bits modulo 2^64, and the numbers of the sum.

    canaries, count      1 each: of a right sum they are the number of its members
    weight               A = 2^52 a, an integer
    within               1 if the norm of the update is at most C
    fills                of each float tensor: 1 if a value was cut; 1 if all values are small
    integers             of each element: P = A u;  P mod 2^58, and floor(P / 2^58)
    metrics              of each metric: 1, then its sums in steps of 2^-20; zeros if the member lacks it

An integer tensor's mean is round_half_even(sum A u / sum A), the formula of the plain fold with the weights A in place
of the numbers of examples. With 64 members each word of such a sum stays within its 64 bits: A <= 2^52 and |u| <= 2^63.
"""

import math
from collections.abc import Iterable, Mapping, Sequence
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from atoll.ground.printable import count_of
from atoll.tensors.secure.masked_layout import Exact, MetricShape
from atoll.tensors.secure.vector import SMALL, WEIGHT_BITS, Fill

LOW_BITS = 58
"""Bits of the lower word of a product."""
METRIC_BITS = 20
"""A metric's sums are multiples of 2^-20."""
METRIC_MAX = 2.0**36
"""Largest magnitude of a metric's sum of one member: 64 of them stay within a word."""

Statistics = Mapping[str, Sequence[float]]
Words = NDArray[np.uint64]


def fault_of_metric(shape: MetricShape, sums: Sequence[float] | None) -> str:
    """Return why a metric's sums of one member cannot be added; empty: they can, or the member has none."""
    if not sums:
        return ""
    if len(sums) != shape.length:
        return f"metric {shape.name!r} has {count_of(len(sums), 'sum')}, and the terms have {shape.length}"
    if not all(math.isfinite(each) and abs(each) <= METRIC_MAX for each in sums):
        return f"metric {shape.name!r} has a sum that is not within {METRIC_MAX:g}"
    return ""


def encode_exact(
    places: Exact,
    *,
    weight: int,
    is_within: bool,
    fills: Iterable[Fill],
    integers: Mapping[str, NDArray[Any]],
    statistics: Statistics,
) -> Words:
    """Return the words of one member.

    Args:
        places: of the words.
        weight: A.
        is_within: whether the norm of the update is at most C.
        fills: of each float tensor, in order.
        integers: the values of each integer tensor, as int64, or as Python's integers with |A u| at most 2^114.
        statistics: sums of the training's metrics; those that are not in the terms, or have a fault, are left out.
    """
    words = np.zeros(places.size, np.uint64)
    words[places.canaries] = 1
    words[places.members] = 1
    words[places.weight] = weight
    words[places.within] = int(is_within)
    words[places.fills] = [
        flag for fill in fills for flag in (int(fill.cut > 0), int(0.0 < fill.largest < SMALL and not fill.cut))
    ]
    for name, place in places.integers.items():
        words[place] = _products(np.asarray(integers[name]).reshape(-1), weight).reshape(-1)
    for shape, place in places.metrics.items():
        sums = statistics.get(shape.name)
        if sums and not fault_of_metric(shape, sums):
            steps = [round(math.ldexp(each, METRIC_BITS)) for each in sums]
            words[place] = np.array([1, *steps], np.int64).view(np.uint64)
    return words


def _products(values: NDArray[Any], weight: int) -> Words:
    """Return the two words (2, elements) of each product."""
    products: NDArray[Any]
    if max(int(values.max(initial=0)), -int(values.min(initial=0))) * weight < 1 << 62:
        products = values * np.int64(weight)
    else:
        products = values.astype(object) * weight
    low, high = products & ((1 << LOW_BITS) - 1), products >> LOW_BITS
    return np.stack([low.astype(np.int64), high.astype(np.int64)]).view(np.uint64)


class WrongSum(ValueError):
    """Words that are no sum of this number of members; the message says why."""


class ExactSum(NamedTuple):
    """The numbers of a sum.

    Attributes:
        members: of the sum.
        weight: sum of A.
        within: members whose norm is at most C.
        cut: for each float tensor the members that have cut values.
        small: for each float tensor the members whose values are small.
        integers: sum of A u of each integer tensor, as Python's integers.
        statistics: sums of the metrics that a member has.
        having: for each of these metrics the members that have it.
    """

    members: int
    weight: int
    within: int
    cut: tuple[int, ...]
    small: tuple[int, ...]
    integers: Mapping[str, NDArray[Any]]
    statistics: Mapping[str, tuple[float, ...]]
    having: Mapping[str, int]


def decode_exact(words: Words, places: Exact, members: int) -> ExactSum:
    """Return the numbers of a sum.

    Args:
        words: the sum, without streams.
        places: of the words.
        members: of the sum.

    Raises:
        WrongSum: a canary or the count is not the number of members, the weight is beyond that number, or another
            count is above it.
    """
    canaries = {int(word) for word in words[places.canaries]} | {int(words[places.members])}
    if canaries != {members}:
        raise WrongSum(f"its canaries are {', '.join(map(str, sorted(canaries)[:3]))} instead of {members}")
    weight = int(words[places.weight])
    if not members <= weight <= members << WEIGHT_BITS:
        of = count_of(members, "member")
        raise WrongSum(f"its weight is {math.ldexp(weight, -WEIGHT_BITS):g}; allowed of {of}: up to {members}")
    counts = [int(words[places.within]), *map(int, words[places.fills])]
    having = {shape: int(words[place][0]) for shape, place in places.metrics.items()}
    if max([*counts, *having.values()]) > members:
        raise WrongSum(f"it counts {max([*counts, *having.values()])} of {count_of(members, 'member')}")
    integers = {name: _sum_of_products(words[place]) for name, place in places.integers.items()}
    signed = words.view(np.int64)
    statistics = {
        shape.name: tuple(math.ldexp(step, -METRIC_BITS) for step in signed[place][1:].tolist())
        for shape, place in places.metrics.items()
        if having[shape]
    }
    return ExactSum(
        members,
        weight,
        counts[0],
        tuple(counts[1::2]),
        tuple(counts[2::2]),
        integers,
        statistics,
        {shape.name: count for shape, count in having.items() if count},
    )


def _sum_of_products(words: Words) -> NDArray[Any]:
    low, high = words.reshape(2, -1)
    total: NDArray[Any] = (high.view(np.int64).astype(object) << LOW_BITS) + low.astype(object)
    return total
