"""The compressions of a gradient, and the bytes that each of them sends.

Legend: d elements of a bucket in float32, n ranks, r the rank of PowerSGD's factors. On a ring an all-reduce of M bytes
sends 2 (n-1)/n M from each rank, an all-to-all of M bytes (n-1)/n M, an all-gather of M bytes from each (n-1) M.

    none          2 (n-1)/n 4 d
    fp16, bf16    2 (n-1)/n 2 d
    int8          2 (n-1)/n 1.004 d         all-to-all, mean, all-gather: an all-reduce whose two halves are encoded
    onebit        (n-1) 0.129 d             all-gather: 31 times less than 4 d at 2 ranks, 8 times at 8
    powersgd:r    2 (n-1)/n 4 r (a + b)     for a matrix of a x b; a matrix that saves less than half is sent whole
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass

from atoll.ground.printable import count_of
from atoll.parallel.communication.block_sizes import INT8_ROW, SIGN_ROW, num_blocks

NAMES = ("none", "fp16", "bf16", "int8", "onebit", "powersgd:RANK")
"""The forms of a setting."""

MIN_SAVING = 2
"""Least saving of PowerSGD: a matrix is sent whole unless its two factors are smaller than its size divided by this."""


@dataclass(frozen=True, slots=True)
class Compression:
    """A compression, parsed from a setting."""

    name: str
    """The name: none, fp16, bf16, int8, onebit or powersgd."""

    rank: int = 0
    """The columns of each of PowerSGD's two factors (>= 1); 0 for all others."""


def parse_compression(text: str) -> Compression:
    """Parse the compression of a setting, such as `int8` or `powersgd:4`.

    Raises:
        ValueError: unknown name, or a rank that is missing or no whole number from 1.
    """
    name, colon, rank = text.partition(":")
    if name == "powersgd":
        if not rank.isdecimal() or int(rank) < 1:
            raise ValueError(
                f"compression: powersgd needs its rank, a whole number from 1 as in powersgd:4, got {text!r}"
            )
        return Compression(name, int(rank))
    if colon or name not in NAMES:
        raise ValueError(f"compression: must be one of {', '.join(NAMES)}, got {text!r}")
    return Compression(name)


def bytes_per_rank(
    compression: str, num_elements: int, world: int, shapes: Sequence[Sequence[int]] | None = None
) -> float:
    """Return the bytes that each rank sends to reduce one bucket once, if the collectives run on rings.

    Args:
        compression: as for `parse_compression`.
        num_elements: d, in float32.
        world: n >= 1.
        shapes: the shapes of the bucket's tensors; only powersgd needs them.

    Raises:
        ValueError: unknown compression, or powersgd without shapes of `num_elements` in all.
    """
    chosen, all_reduce = parse_compression(compression), 2 * (world - 1) / world
    match chosen.name:
        case "none":
            return all_reduce * 4 * num_elements
        case "fp16" | "bf16":
            return all_reduce * 2 * num_elements
        case "int8":
            return all_reduce * world * INT8_ROW * num_blocks(num_elements, world)
        case "onebit":
            return float((world - 1) * SIGN_ROW * num_blocks(num_elements, 1))
    if shapes is None or sum(map(math.prod, shapes)) != num_elements:
        raise ValueError(
            f"compression: powersgd needs the shapes of its {count_of(num_elements, 'element')}, got {shapes!r}"
        )
    return all_reduce * 4 * sum(_factored(shape, chosen.rank) for shape in shapes)


def _factored(shape: Sequence[int], rank: int) -> int:
    """Return the elements that PowerSGD sends of a tensor, as a matrix of its first axis and all others."""
    rows, columns = shape[0], math.prod(shape[1:])
    factors = (rows + columns) * min(rows, columns, rank)
    return factors if factors * MIN_SAVING < rows * columns else rows * columns
