"""The layout of a masked update: the words of a secure sum, from the tensors of the base version that travel.

    float tensors           I32 or I64 words of the same names and shapes (`vector`)
    everything else         one tensor `secure/exact` of 64-bit words (`exact`)

Integer tensors are no tensors of a masked update: their words are in `secure/exact`, where a sum needs no rounding.
"""

import hashlib
import json
from collections.abc import Iterable, Mapping, Sequence
from typing import NamedTuple

from atoll.ground.printable import count_of
from atoll.tensors.layout import BESIDE, FLOATS, SECURE, Layout, Tensor, in_order

EXACT = SECURE + "exact"
"""The name of the tensor of the numbers that are added exactly."""
WORD_NAMES = {32: "I32", 64: "I64"}
"""The dtype of a float tensor's words, by their bits."""
METRICS_MAX, SUMS_MAX = 100, 10_000
"""Most metrics of a sum, and most numbers of all of them together."""
NAME_MAX = 200
"""Most characters of a metric's name."""


class MetricShape(NamedTuple):
    """The name of a metric of the training, and how many numbers its sums have."""

    name: str
    length: int


Metrics = Sequence[tuple[str, int]]
"""Names and numbers of sums, in order."""


def floats_of(layout: Layout) -> Layout:
    """Return the float tensors of a layout, in the order of their words and of their ranges: by name."""
    return tuple(sorted((tensor for tensor in layout if tensor.dtype in FLOATS), key=lambda tensor: tensor.name))


def exponents_of(told: tuple[int, ...], layout: Layout) -> tuple[int, ...]:
    """Return the exponents of the ranges of a layout's float tensors: those that a round was told, or zeros."""
    return told or (0,) * len(floats_of(layout))


def integers_of(layout: Layout) -> Layout:
    """Return the integer tensors of a layout, in canonical order."""
    return in_order(tensor for tensor in layout if tensor.dtype not in FLOATS)


def masked_layout(layout: Layout, bits: int, metrics: Metrics = ()) -> Layout:
    """Return the tensors of a masked update, in the order of their positions: the floats, then `secure/exact`.

    Args:
        layout: of the base version's tensors that travel.
        bits: of a word of a float: 32 or 64.
        metrics: whose sums are added, in order (`in_metric_order`).
    """
    dtype = WORD_NAMES[bits]
    floats = tuple(Tensor(tensor.name, dtype, tensor.shape) for tensor in floats_of(layout))
    return (*floats, Tensor(EXACT, "I64", (num_exact(layout, metrics),)))


def in_positions(masked: Layout) -> Layout:
    """Return the tensors of a masked update in the order of their positions, whatever their order in a file."""
    return tuple(sorted(masked, key=lambda tensor: (tensor.name == EXACT, tensor.name)))


class Exact(NamedTuple):
    """The places of the words of `secure/exact`.

    Attributes:
        canaries: `CANARIES` words of 1, of which the sum is the number of members.
        members: 1.
        weight: a, in steps of 2^-52.
        within: 1 if the update's norm is at most C.
        fills: for each float tensor 1 if a value was cut, and 1 if all values are small; two words each.
        integers: of each integer tensor.
        metrics: of each metric: 1, then its sums.
        size: number of words.
    """

    canaries: slice
    members: int
    weight: int
    within: int
    fills: slice
    integers: Mapping[str, slice]
    metrics: Mapping[MetricShape, slice]
    size: int


CANARIES = 4
INTEGER_WORDS = 2
"""Words of an element of an integer tensor: the lower and the upper part of its product with the weight."""


def exact_of(layout: Layout, metrics: Metrics) -> Exact:
    """Return the places of the words of `secure/exact`.

    Args:
        layout: of the base version's tensors that travel.
        metrics: in order.
    """
    position = CANARIES + 3
    fills = slice(position, position + 2 * len(floats_of(layout)))
    position = fills.stop
    integers, sums = {}, {}
    for tensor in integers_of(layout):
        integers[tensor.name] = slice(position, position + INTEGER_WORDS * tensor.num_elements)
        position = integers[tensor.name].stop
    for metric in (MetricShape(*pair) for pair in metrics):
        sums[metric] = slice(position, position + 1 + metric.length)
        position = sums[metric].stop
    return Exact(slice(0, CANARIES), CANARIES, CANARIES + 1, CANARIES + 2, fills, integers, sums, position)


def num_exact(layout: Layout, metrics: Metrics) -> int:
    """Return the number of words of `secure/exact`."""
    integers = sum(tensor.num_elements for tensor in integers_of(layout))
    return (
        CANARIES + 3 + 2 * len(floats_of(layout)) + INTEGER_WORDS * integers + sum(1 + length for _, length in metrics)
    )


def in_metric_order(lengths: Mapping[str, int] | Iterable[tuple[str, int]]) -> tuple[MetricShape, ...]:
    """Return metrics in the order in which their sums are added: by name.

    Raises:
        ValueError: there are too many, or a name or a length is out of range.
    """
    pairs = lengths.items() if isinstance(lengths, Mapping) else lengths
    metrics = tuple(MetricShape(*pair) for pair in sorted(pairs))
    total = sum(metric.length for metric in metrics)
    if len(metrics) > METRICS_MAX or total > SUMS_MAX or len({metric.name for metric in metrics}) < len(metrics):
        given = f"{count_of(len(metrics), 'metric')} of {count_of(total, 'sum')}"
        raise ValueError(f"{given}, allowed: {METRICS_MAX} different of {SUMS_MAX}")
    for name, length in metrics:
        if not 1 <= length <= SUMS_MAX or not 1 <= len(name) <= NAME_MAX:
            sums, allowed = count_of(length, "sum"), f"1 or more, and a name of 1 to {NAME_MAX} characters"
            raise ValueError(f"metric {name!r:.220} has {sums}, allowed: {allowed}")
    return metrics


def travels(layout: Layout) -> Layout:
    """Return the tensors of a base version that a secure sum takes.

    Raises:
        ValueError: there are tensors beside the model, which a sum cannot take.
    """
    if beside := [tensor.name for tensor in layout if tensor.name.startswith(BESIDE)]:
        raise ValueError(f"{', '.join(beside[:5])}: a secure sum takes the tensors of the model alone")
    return in_order(layout)


def layout_digest(layout: Layout, metrics: Metrics) -> str:
    """Return the SHA-256 of what a secure sum adds, for its terms: names, dtypes and shapes, and the metrics."""
    document = {
        "tensors": [[tensor.name, tensor.dtype, list(tensor.shape)] for tensor in in_order(layout)],
        "metrics": [list(metric) for metric in metrics],
    }
    return hashlib.sha256(json.dumps(document, sort_keys=True, separators=(",", ":")).encode()).hexdigest()
