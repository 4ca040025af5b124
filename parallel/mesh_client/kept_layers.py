"""Layers that stay at the site (`Local.keep`), on a mesh: whole tensors in the client's file; a rank reads its boxes.

So the mesh may change between rounds, and a site may go from one process to a mesh and back.
"""

from collections.abc import Sequence
from pathlib import Path

import numpy as np
import torch

from atoll.parallel.exchange.shares import Share
from atoll.parallel.exchange.write import BLOCK_ELEMENTS
from atoll.task.errors import NotFinite
from atoll.tensors.safetensors_file import NUMPY_DTYPES
from atoll.tensors.shared_file import BoxWriter


def store_layers(shares: Sequence[Share], own_out: Path) -> None:
    """Write boxes into a client's file (`shared_file.make_shared`), block by block; without boxes none is opened.

    Args:
        shares: the boxes that this rank stores.
        own_out: the file.

    Raises:
        NotFinite: tensors have NaN or infinite values; with their names.
        OSError: it cannot be written.
    """
    if not shares:
        return
    wrong = []
    with BoxWriter(own_out) as file:
        for share in shares:
            flat, is_finite = share.local.reshape(-1), True
            for start in range(0, flat.numel(), BLOCK_ELEMENTS):
                block = flat[start : start + BLOCK_ELEMENTS].detach().cpu()
                as_stored = block.float() if block.is_floating_point() else block.to(_whole(block.dtype))
                values = as_stored.numpy().astype(NUMPY_DTYPES[share.piece.dtype], copy=False)
                is_finite = is_finite and bool(np.isfinite(values).all())
                file.write(share.piece, start, values)
            wrong += [] if is_finite else [share.name]
    if wrong:
        raise NotFinite(f"NaN or infinite values in {', '.join(wrong)}")


def _whole(dtype: torch.dtype) -> torch.dtype:
    return torch.uint8 if dtype == torch.bool else dtype
