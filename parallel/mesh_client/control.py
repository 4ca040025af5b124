"""SCAFFOLD's control variates on a mesh: boxes of the files in which they lie, as `training.local.scaffold` has arrays.

c lies in the version's file and c_i in the client's, both under `control/<parameter>` as whole tensors, so that
the mesh may change between rounds. What is sent, c_i+ - c_i, has the boxes of the update.
"""

from collections.abc import Iterator, Sequence
from contextlib import ExitStack
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray

from atoll.parallel.exchange.load import check_shares, load_shares
from atoll.parallel.exchange.shares import Share
from atoll.parallel.exchange.write import BLOCK_ELEMENTS, Box, differences
from atoll.parallel.mesh_client.building import Shard
from atoll.task.errors import NotFinite
from atoll.tensors.box_reader import BoxReader
from atoll.tensors.layout import CONTROL
from atoll.tensors.safetensors_file import parse_header
from atoll.tensors.shared_file import BoxWriter


def corrections_of(shards: Sequence[Shard], version: Path, own: Path | None) -> list[torch.Tensor]:
    """Return c - c_i of the boxes of parameters, of their dtypes.

    Args:
        shards: the boxes.
        version: file with c.
        own: file with c_i; None: zeros.

    Raises:
        TaskMismatch: a file has no variates of this model.
    """
    found = [_like(shard.share) for shard in shards]
    load_shares(found, version)
    if own is not None:
        load_shares(found, own, lambda ours, theirs: ours.sub_(theirs.to(ours)))
    return [share.local.to(shard.share.local) for share, shard in zip(found, shards, strict=True)]


class ControlBoxes:
    """The boxes of c_i+ - c_i that this rank sends; c_i+ is written into the client's file beside them.

    Args:
        owned: the boxes of trained parameters that this rank sends, after the training.
        version: file with the start of the training, and with c.
        own: file with c_i; None: zeros.
        own_out: file for c_i+ (`shared_file.make_shared`).
        steps_by_lr: K η.
    """

    def __init__(
        self, owned: Sequence[Share], version: Path, own: Path | None, own_out: Path, steps_by_lr: float
    ) -> None:
        self._owned, self._steps_by_lr = owned, steps_by_lr
        control = [_named(share) for share in owned]
        check_shares(control, parse_header(version)[0], str(version))
        self._global = BoxReader(version, *parse_header(version), [share.piece for share in owned])
        self._server = BoxReader(version, *parse_header(version), [share.piece for share in control])
        self._client = None if own is None else BoxReader(own, *parse_header(own), [s.piece for s in control])
        self._stored, self._stack = BoxWriter(own_out), ExitStack()

    def __enter__(self) -> list[Box]:
        for file in (self._global, self._server, self._client, self._stored):
            if file is not None:
                self._stack.enter_context(file)
        boxes, begin = [], 0
        for share in self._owned:
            boxes.append(Box(_named(share).piece, partial(self._blocks, share, begin)))
            begin += share.piece.num_bytes
        return boxes

    def __exit__(self, *error: Any) -> None:
        self._stack.__exit__(*error)

    def _blocks(self, share: Share, begin: int) -> Iterator[NDArray[np.float32]]:
        """Yield c_i+ - c_i = -c - u / (K η), and store c_i+."""
        piece = _named(share).piece
        for number, update in enumerate(differences(share, self._global, begin)):
            start = begin + 4 * number * BLOCK_ELEMENTS
            stop = start + 4 * update.size
            server = np.frombuffer(self._server.read(start, stop), np.float32)
            with np.errstate(over="ignore"):
                exact = -server.astype(np.float64) - update.astype(np.float64) / self._steps_by_lr
                sent = exact.astype(np.float32)
                before = np.float32(0) if self._client is None else np.frombuffer(self._client.read(start, stop), "<f4")
                stored = before + sent
            if not np.isfinite(stored).all():
                raise NotFinite(f"the control variate has NaN or infinite values in {share.name}")
            self._stored.write(piece, number * BLOCK_ELEMENTS, stored)
            yield sent


def _named(share: Share) -> Share:
    """Return a parameter's box as that of its variate, which is float32."""
    return replace(share, name=CONTROL + share.name)


def _like(share: Share) -> Share:
    """Return the box of a variate, with memory for its values."""
    return replace(_named(share), local=torch.empty(share.lengths, device=share.local.device))
