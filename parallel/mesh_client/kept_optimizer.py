"""The state of the local optimizer that stays at the client, on a mesh (`training.local.kept_optimizer`).

It lies in the client's file as whole tensors, so that the mesh may change between rounds, and a site may go from one
process to a mesh and back.
"""

from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import torch

from atoll.parallel.exchange.load import load_shares
from atoll.parallel.exchange.shares import Share
from atoll.parallel.exchange.write import BLOCK_ELEMENTS
from atoll.parallel.mesh_client.building import Shard
from atoll.task.errors import NotFinite
from atoll.task.local import Local
from atoll.tensors.layout import Piece
from atoll.tensors.safetensors_file import parse_header
from atoll.tensors.shared_file import BoxWriter
from atoll.training.local.kept_optimizer import MOMENTS, STEP, counter, has_steps, prefix_of
from atoll.training.optimizers.norms import local as local_of


def give_state(shards: Sequence[Shard], local: Local, own: Path) -> None:
    """Load a client's kept state into the new optimizers of this rank; nothing if it is of another optimizer.

    Raises:
        TaskMismatch: the file is of another model.
        OSError: it cannot be read.
    """
    if not any(tensor.name.startswith(prefix_of(local)) for tensor in parse_header(own)[0]):
        return
    aims: list[Share] = []
    counts: list[tuple[Shard, torch.Tensor]] = []
    for shard in shards:
        share = shard.share
        for entry in MOMENTS[local.optimizer_name]:
            shard.state[entry] = torch.zeros_like(shard.parameter).detach()
            name = prefix_of(local, entry) + share.name
            aims.append(replace(share, name=name, local=local_of(shard.state[entry])))
        if has_steps(local):
            steps = torch.zeros(())
            aims.append(Share(prefix_of(local, STEP) + share.name, (), (), (), steps, 1, 0))
            counts.append((shard, steps))
    load_shares(aims, own)
    for shard, steps in counts:
        shard.state[STEP] = counter(float(steps), shard.group, shard.parameter)


def store_state(shards: Sequence[Shard], local: Local, own_out: Path) -> None:
    """Write the boxes of the state that this rank owns into a client's file (`shared_file.make_shared`).

    Args:
        shards: the shards that this rank owns, after the training.
        local: the settings of the round.
        own_out: the file.

    Raises:
        NotFinite: tensors have values that are not finite; the message has their names.
        OSError: it cannot be written.
    """
    wrong = []
    with BoxWriter(own_out) as file:
        for shard in shards:
            share, state = shard.share, shard.state
            for entry in MOMENTS[local.optimizer_name]:
                if entry in state:
                    piece = Piece(prefix_of(local, entry) + share.name, "F32", share.offsets, share.lengths, "")
                    wrong += _written(file, piece, local_of(state[entry]))
            if has_steps(local) and STEP in state and not any(share.offsets):
                piece = Piece(prefix_of(local, STEP) + share.name, "F32", (), (), "")
                wrong += _written(file, piece, local_of(state[STEP]))
    if wrong:
        raise NotFinite(*wrong)


def _written(file: BoxWriter, piece: Piece, values: torch.Tensor) -> list[str]:
    """Write a box block by block; return the fault of its values."""
    flat, is_finite = values.detach().reshape(-1), True
    for start in range(0, flat.numel(), BLOCK_ELEMENTS):
        block: np.ndarray[Any, Any] = flat[start : start + BLOCK_ELEMENTS].to("cpu", torch.float32).numpy()
        is_finite = is_finite and bool(np.isfinite(block).all())
        file.write(piece, start, block)
    return [] if is_finite else [f"the optimizer's state has NaN or infinite values in {piece.tensor}"]
