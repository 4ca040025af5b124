"""The positions of a model's elements in the key streams, which depend on the layout alone.

Tensors lie one after the other in canonical order, the floats first, then `secure/exact`; each begins at a multiple of
four words, so that a block of 16 bytes belongs to one tensor. Element e of a tensor, in C order, has the word
start + e. So each owner of a box of a tensor, one process or a rank of a mesh, masks it with the same words.
"""

from collections.abc import Iterator

from atoll.tensors.layout import ITEM_BYTES, Layout, Piece
from atoll.tensors.runs import runs_of

ALIGNMENT = 4
"""Words to a multiple of which a tensor's start is rounded up: one block of 32-bit words, two of 64."""


def starts_of(layout: Layout) -> dict[str, int]:
    """Return the position of each tensor's first element; the layout is that of a masked update, in canonical order."""
    starts, position = {}, 0
    for tensor in layout:
        starts[tensor.name] = position
        position += -(-tensor.num_elements // ALIGNMENT) * ALIGNMENT
    return starts


def runs_in(box: Piece, shape: tuple[int, ...], start: int) -> Iterator[tuple[int, int]]:
    """Yield the runs of a box as first position and number of words, in the order of its elements.

    Args:
        box: of a tensor; empty: no runs.
        shape: of the tensor.
        start: position of the tensor.
    """
    if not box.num_elements:
        return
    item = ITEM_BYTES[box.dtype]
    runs = runs_of(box, shape, start * item)
    total, number = 1, 0
    for length in runs.lengths:
        total *= length
    while number < total:
        at, alike = runs.at(number)
        for _ in range(alike):
            yield at // item, runs.size // item
            at += runs.distance
        number += alike
