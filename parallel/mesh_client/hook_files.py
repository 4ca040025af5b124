"""The shared tensors and the client's state of a custom algorithm, as boxes of the files in which they lie.

Both lie there as whole tensors, under `algorithm/NAME` and `state/NAME`. So the mesh may change between rounds, and a
site may go from one process to a mesh and back.
"""

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from functools import partial
from pathlib import Path

import torch
from torch import nn
from torch.distributed.tensor import DTensor

from atoll.parallel.engine.axes import Axes
from atoll.parallel.exchange.load import load_shares
from atoll.parallel.exchange.shares import Share, owned, share_of
from atoll.parallel.exchange.write import Box, differences
from atoll.parallel.hooks import MeshClient, hooked, placed, settled, stand_in
from atoll.parallel.mesh_client.building import MeshModel
from atoll.task.context import Context
from atoll.task.errors import TaskMismatch
from atoll.task.local import Local
from atoll.task.task import Task
from atoll.tensors.box_reader import BoxReader
from atoll.tensors.layout import SHARED, STATE
from atoll.tensors.safetensors_file import parse_header
from atoll.training.local.client import Tensors


def client_of(
    task: Task, outline: nn.Module, model: MeshModel, local: Local, context: Context, version: Path, own: Path | None
) -> MeshClient | None:
    """Return the client of the task's algorithm; None: it has none. Every rank calls it.

    Args:
        task: the task of the model.
        outline: the model without memory.
        model: the model, with the version's values.
        local: the settings of the round.
        context: the context of the training.
        version: file with the shared tensors.
        own: file of the client's state; None: there is none yet.

    Raises:
        TaskMismatch: a file has other tensors than the algorithm.
        TaskBroken: the algorithm's tensors cannot be sent or stored.
        OSError: a file cannot be read.
    """
    in_version = _names(SHARED, version)
    if task.algorithm is None:
        if in_version:
            raise TaskMismatch(f"{', '.join(in_version)} is unknown: the task has no custom algorithm")
        return None
    tensors = model.tensors()
    with hooked():
        at_first = stand_in(outline, tensors)
        shared = _as_the_model(task.algorithm.shared(at_first), tensors)
        state = _as_the_model(task.algorithm.state(at_first), tensors) if own and _names(STATE, own) else None
    if unknown := [name for name in in_version if name.removeprefix(SHARED) not in shared]:
        raise TaskMismatch(f"{', '.join(unknown)} is unknown")
    received = _read(SHARED, shared, version, model)
    kept = None if state is None or own is None else _read(STATE, state, own, model)
    return MeshClient(task, outline, model.tensors, local, context, shared=received, state=kept)


def _names(prefix: str, file: Path) -> list[str]:
    return [tensor.name for tensor in parse_header(file)[0] if tensor.name.startswith(prefix)]


def _as_the_model(given: Mapping[str, torch.Tensor], tensors: Mapping[str, torch.Tensor]) -> Tensors:
    """Divide tensors over the ranks as the model's tensors of the same names and shapes; others stay whole."""
    like = {name: tensors[name] for name in given if name in tensors and tensors[name].shape == given[name].shape}
    return {name: placed(tensor, like[name]) if name in like else settled(tensor) for name, tensor in given.items()}


def _read(prefix: str, given: Tensors, file: Path, model: MeshModel) -> Tensors:
    """Read the tensors of a prefix from a file, each divided over the ranks as the given one."""
    device = model.engine.device
    here = {name: t if isinstance(t, DTensor) else t.to(device) for name, t in given.items()}
    found = {name: torch.zeros_like(tensor).detach() for name, tensor in here.items()}
    load_shares(_shares(prefix, found, model.engine.axes), file)
    return found


def _shares(prefix: str, tensors: Tensors, axes: Axes | None) -> list[Share]:
    shares = [share_of(prefix + name, tensor, axes) for name, tensor in tensors.items()]
    return [share for share in shares if share is not None]


def own_boxes(prefix: str, tensors: Tensors, axes: Axes | None) -> list[Share]:
    """Return the boxes of an algorithm's tensors that this rank writes: over all ranks each box once."""
    return owned(_shares(prefix, tensors, axes), [prefix + name for name in tensors])


@contextmanager
def shared_boxes(mine: list[Share], version: Path) -> Iterator[list[Box]]:
    """Yield the boxes of the algorithm's shared tensors, as part of the update, for the block.

    Args:
        mine: the boxes, as `own_boxes` returns them.
        version: file with the tensors as they were received.
    """
    with BoxReader(version, *parse_header(version), [share.piece for share in mine]) as reader:
        boxes, begin = [], 0
        for share in mine:
            boxes.append(Box(share.piece, partial(differences, share, reader, begin)))
            begin += share.piece.num_bytes
        yield boxes
