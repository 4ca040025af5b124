"""Buffers, such as a batch norm's running statistics, which differ between ranks because their data does."""

from collections.abc import Collection, Iterator, Sequence
from contextlib import contextmanager

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.tensor import DTensor

from atoll.parallel.engine.axes import Axes


@torch.no_grad()
def average_buffers(parts: Sequence[nn.Module], axes: Axes | None, fixed: Collection[torch.Tensor] = ()) -> None:
    """Make the saved buffers of all ranks with different data equal: floats become their mean, integers the first
    rank's.

    It is called before an evaluation, a checkpoint and an export. Parameters are not touched.

    Args:
        parts: of this rank.
        axes: of the mesh; None: this rank is alone.
        fixed: buffers that no training changes: the mean of three equal floats may be another one.
    """
    if axes is None:
        return
    stay = {id(buffer) for buffer in fixed}
    for axis in ("dp_replicate", "dp_shard"):
        if axes.mesh.degrees[axis] == 1:
            continue
        group = axes.group(axis)
        for part in parts:
            for _, _, buffer in saved_buffers(part):
                if id(buffer) in stay:
                    continue
                value = buffer.to_local() if isinstance(buffer, DTensor) else buffer
                if value.is_floating_point():
                    dist.all_reduce(value, group=group)
                    value.div_(axes.mesh.degrees[axis])
                else:
                    dist.broadcast(value, group_src=0, group=group)


Place = tuple[nn.Module, str, torch.Tensor]
"""The module that holds a buffer, the name of the buffer there, the buffer."""


def saved_buffers(module: nn.Module) -> list[Place]:
    """Return the buffers that are state; all others are tables that a model could compute again."""
    return [
        (holder, name, buffer)
        for holder in module.modules()
        for name, buffer in holder.named_buffers(recurse=False)
        if name not in holder._non_persistent_buffers_set
    ]


@contextmanager
def unchanged(module: nn.Module) -> Iterator[None]:
    """Run the block on copies of the module's saved buffers, so that the buffers stay.

    Copies, because restoring the originals in place would change what an earlier pass has saved for its backward pass.
    """
    places = saved_buffers(module)
    for holder, name, buffer in places:
        setattr(holder, name, buffer.clone())
    try:
        yield
    finally:
        for holder, name, buffer in places:
            setattr(holder, name, buffer)
