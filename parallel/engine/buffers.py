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
    """Make the saved buffers of all ranks with different data equal.

    Floats become their mean, integers the first rank's. Equal floats keep their bits: the mean of three equal floats
    may differ from them.

    It is called before an evaluation, a checkpoint and an export. Parameters are not touched.

    Args:
        parts: the parts of this rank.
        axes: the axes of the mesh; None: this rank is alone.
        fixed: buffers that no training changes, which are not written.
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
                    _take_mean(value, group)
                else:
                    _take_first(value, group)


@torch.no_grad()
def differing_buffers(
    parts: Sequence[nn.Module], axes: Axes | None, without: tuple[type[nn.Module], ...] = ()
) -> list[str]:
    """Return the names of saved buffers whose values differ between ranks with different data.

    A forward pass has changed them by a rank's examples. The names are those in the modules, and equal on all ranks of
    a stage.

    One broadcast of each buffer. The tolerance, 1e-6 of the value, is for machines that round otherwise.

    Args:
        parts: the parts of this rank.
        axes: the axes of the mesh; None: this rank is alone.
        without: types of modules whose buffers are not compared.
    """
    found: dict[str, torch.Tensor] = {}
    for axis in ("dp_replicate", "dp_shard") if axes is not None else ():
        assert axes is not None
        if axes.mesh.degrees[axis] == 1:
            continue
        for part in parts:
            for holder, name, buffer in saved_buffers(part):
                if isinstance(holder, without):
                    continue
                value = buffer.to_local() if isinstance(buffer, DTensor) else buffer
                first = value.detach().clone()
                _take_first(first, axes.group(axis))
                differs = ~torch.isclose(value, first, rtol=1e-6, atol=0.0, equal_nan=True).all()
                key = f"{type(holder).__name__}.{name}"
                found[key] = found.get(key, torch.zeros_like(differs)) | differs
    if not found or axes is None:
        return []
    flags = axes.sum_over(torch.stack([*found.values()]).to(torch.float32), "dp_replicate", "dp_shard")
    return [name for name, flag in zip(found, flags.tolist(), strict=True) if flag]


def _take_mean(value: torch.Tensor, group: dist.ProcessGroup) -> None:
    """Replace a tensor by its mean over the ranks of a group; where all have the same value, exactly that."""
    first = value.detach().clone()
    _take_first(first, group)
    both = torch.stack([value, (value != first).to(value.dtype)])
    dist.all_reduce(both, group=group)
    total, differing = both
    value.copy_(torch.where(differing == 0, first, total / group.size()))


def _take_first(value: torch.Tensor, group: dist.ProcessGroup) -> None:
    """Broadcast the first rank's values to all ranks of a group; as bytes, since gloo lacks some dtypes."""
    data = value.contiguous().reshape(-1).view(torch.uint8)
    dist.broadcast(data, group_src=0, group=group)
    value.copy_(data.view(value.dtype).reshape(value.shape))


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
