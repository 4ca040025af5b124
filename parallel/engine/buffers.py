"""Buffers, such as a batch norm's running statistics: each rank's differ, because its data does."""

from collections.abc import Sequence

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.tensor import DTensor

from atoll.parallel.engine.mesh import Axes


@torch.no_grad()
def average_buffers(parts: Sequence[nn.Module], axes: Axes | None) -> None:
    """Make the saved buffers of all ranks with different data equal: floats become their mean, integers the first's.

    For before an evaluation, a checkpoint and an export. Parameters are not touched.
    """
    if axes is None:
        return
    for axis in ("dp_replicate", "dp_shard"):
        if axes.mesh.degrees[axis] == 1:
            continue
        group = axes.group(axis)
        for part in parts:
            saved = part.state_dict().keys()
            for buffer in (buffer for name, buffer in part.named_buffers() if name in saved):
                value = buffer.to_local() if isinstance(buffer, DTensor) else buffer
                if value.is_floating_point():
                    dist.all_reduce(value, group=group)
                    value.div_(axes.mesh.degrees[axis])
                else:
                    dist.broadcast(value, group_src=0, group=group)
