"""The rows that a training reads: their number, and a checksum of some of them, by which other rows are noticed.

A row that has been added or removed changes the number, and moves the rows behind it; so the checksum is of rows at
equal distances, including the first and the last; for tensors of moderate size, of all rows.
"""

import zlib
from typing import Any

import numpy as np
import torch
from torch.utils.data import TensorDataset

from atoll.ground.printable import count_of
from atoll.training.data.draws import drawing, is_fixed
from atoll.training.data.rows import CONSTANTS
from atoll.training.data.trees import leaves

SOME, MANY = 16, 4096
"""Rows that are compared: of a data set whose reading may be slow, and of one of tensors."""

WHOLE_BYTES = 1 << 26
"""Size of a `TensorDataset` up to which all of its rows are compared [bytes]."""

Rows = dict[str, int]
"""The number of rows, and a checksum in [0, 2^32); plain JSON."""


def rows_read(dataset: Any, seed: int) -> Rows:
    """Return the number and the checksum of a data set's rows, as a training's first epoch reads them.

    Args:
        dataset: map-style.
        seed: the seed of the training, for rows that draw random numbers.
    """
    number = len(dataset)
    count = number if _is_small(dataset) else min(number, MANY if is_fixed(dataset) else SOME)
    fetch, found = drawing(dataset, seed), 0
    indices = torch.linspace(0, number - 1, count, dtype=torch.float64).round().long()
    for rows in [indices] if is_fixed(dataset) else torch.tensor_split(indices, count):
        for leaf in leaves(fetch(0, rows)):
            found = _added(leaf, found)
    return {"rows": number, "checksum": found}


def other_rows(before: Rows, now: Rows) -> str:
    """Return the difference of two readings as the end of a sentence; empty: there is none."""
    if before["rows"] != now["rows"]:
        return f"on {count_of(before['rows'], 'row')}, and now there {_are(now['rows'])}"
    return f"on other rows than the {now['rows']} of now" if before != now else ""


def _is_small(dataset: Any) -> bool:
    return type(dataset) is TensorDataset and sum(each.nbytes for each in dataset.tensors) <= WHOLE_BYTES


def _are(number: int) -> str:
    return f"is {number}" if number == 1 else f"are {number}"


def _added(leaf: Any, found: int) -> int:
    """Return the checksum with one more leaf of a batch: a tensor, an array, or a value of Python."""
    if isinstance(leaf, np.ndarray) and leaf.dtype != object:
        leaf = torch.from_numpy(np.ascontiguousarray(leaf))
    if not isinstance(leaf, torch.Tensor):
        return zlib.crc32(repr(leaf).encode() if isinstance(leaf, CONSTANTS) else b"", found)
    found = zlib.crc32(f"{leaf.dtype} {tuple(leaf.shape)}".encode(), found)
    if leaf.is_sparse or leaf.is_nested or leaf.is_quantized:
        return found
    content: Any = leaf.detach().cpu().contiguous().flatten().view(torch.uint8).numpy()
    return zlib.crc32(content, found)
