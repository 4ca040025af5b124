"""The loading of a version's file into the shards of a mesh: each rank reads its boxes, block by block."""

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch

from atoll.parallel.exchange.shares import Share
from atoll.task.errors import TaskMismatch
from atoll.tensors.box_reader import BoxReader
from atoll.tensors.layout import ITEM_BYTES, Layout
from atoll.tensors.safetensors_file import NUMPY_DTYPES, parse_header

BLOCK_BYTES = 1 << 20
"""Size of a block, which is all that a rank holds beside its shards [bytes]."""


def load_shares(
    shares: Sequence[Share], file: Path, write: Callable[[torch.Tensor, torch.Tensor], Any] = torch.Tensor.copy_
) -> None:
    """Load the values of a version's file into the shards of this rank, rounded to their dtypes.

    Memory: one block. No communication: ranks read the same file, each its boxes.

    Args:
        shares: the shares of this rank, all boxes that it holds (`shares_of`).
        file: a safetensors file of the whole model, as it is sent.
        write: (some elements of a shard, the file's elements) -> None; left out, the shard becomes what the file has.

    Raises:
        TaskMismatch: the file lacks a tensor, or has it in another shape or dtype; the message lists every
        difference, and no value is changed.
        TensorFileCorrupted: the file is no safetensors file.
        OSError: the file cannot be read, or is too short.
    """
    layout, data_start = parse_header(file)
    check_shares(shares, layout, str(file))
    with BoxReader(file, layout, data_start, [share.piece for share in shares]) as reader, torch.no_grad():
        begin = 0
        for share in shares:
            dtype = NUMPY_DTYPES[share.piece.dtype]
            flat, size = _flat(share.local), share.piece.num_bytes
            for start in range(0, size, BLOCK_BYTES):
                stop = min(start + BLOCK_BYTES, size)
                block = np.frombuffer(bytearray(reader.read(begin + start, begin + stop)), dtype)
                first = start // dtype.itemsize
                write(flat[first : first + block.size], torch.from_numpy(block))
            if not share.local.is_contiguous():
                share.local.copy_(flat.view(share.local.shape))
            begin += size


def check_shares(shares: Sequence[Share], layout: Layout, where: str) -> None:
    """Check that a file has the tensors of the shares, in the same shapes and dtypes.

    Raises:
        TaskMismatch: they differ; the message lists every difference.
    """
    in_file = {tensor.name: tensor for tensor in layout}
    faults = []
    for share in shares:
        found, dtype = in_file.get(share.name), share.piece.dtype
        if found is None:
            faults.append(f"{share.name} is missing in {where}")
        elif (found.dtype, found.shape) != (dtype, share.shape):
            faults.append(f"{share.name} is {found.dtype} {found.shape} in {where}, expected {dtype} {share.shape}")
    if faults:
        raise TaskMismatch(*dict.fromkeys(faults))


def _flat(local: torch.Tensor) -> torch.Tensor:
    """Return the values of a shard in C order: a view, or a copy of one that is not contiguous."""
    return local.view(-1) if local.is_contiguous() else local.reshape(-1)


assert all(BLOCK_BYTES % size == 0 for size in ITEM_BYTES.values())
