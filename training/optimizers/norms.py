"""The L2 norm of every tensor of a sharded model, with one small all-reduce per mesh axis instead of one per tensor.

    norm_i = sqrt( sum over the shards s of tensor i of |shard_s|² )

The squared norms of this rank's shards are stacked into one vector, and that vector is summed over each axis of the
mesh on which the tensors are sharded. Replicated tensors are not summed, and plain tensors need no communication at
all.
"""

from collections.abc import Sequence
from functools import reduce

import torch
import torch.distributed as dist
from torch import Tensor

from atoll.training.optimizers.dtensor import is_dtensor


def local(tensor: Tensor) -> Tensor:
    """Return this rank's shard, as a view; a plain tensor unchanged."""
    return tensor.to_local() if is_dtensor(tensor) else tensor


@torch.no_grad()
def norms(tensors: Sequence[Tensor]) -> Tensor:
    """Return the L2 norm of each of n whole tensors: (n,), in float32, or in float64 if a tensor is.

    Every rank of the tensors' meshes must call it with the same tensors in the same order.

    Raises:
        ValueError: a tensor is an unfinished sum over an axis (Partial), so it has no norm yet.
    """
    return norms_of_shards([local(tensor) for tensor in tensors], tensors)


def total_norm(tensors: Sequence[Tensor]) -> Tensor:
    """Return the L2 norm of all the tensors as one vector: ()."""
    return norms(tensors).square().sum().sqrt()


@torch.no_grad()
def norms_of_shards(shards: Sequence[Tensor], layouts: Sequence[Tensor]) -> Tensor:
    """Return the norms of n whole tensors from this rank's shards: (n,).

    Args:
        shards: this rank's shard of each tensor.
        layouts: for each tensor, another one that is sharded in the same way, such as the parameter of a step.

    Raises:
        ValueError: a layout is an unfinished sum (Partial).
    """
    if not shards:
        return torch.zeros(0)
    dtype = reduce(torch.promote_types, (shard.dtype for shard in shards), torch.float32)
    squares = _squares(shards, dtype)
    for group, members in _groups(layouts):
        stacked = torch.stack([squares[i] for i in members])
        dist.all_reduce(stacked, group=group)
        for i, total in zip(members, stacked.unbind(), strict=True):
            squares[i] = total
    return torch.stack(squares).sqrt()


def _squares(shards: Sequence[Tensor], dtype: torch.dtype) -> list[Tensor]:
    if all(shard.is_cuda for shard in shards):
        return [norm.square() for norm in torch._foreach_norm(list(shards), 2, dtype)]
    # not torch's norm: on a CPU it sums sequentially, with an error of 0.4 % for 50 million numbers
    return [shard.to(dtype).square().sum() for shard in shards]


def _groups(layouts: Sequence[Tensor]) -> list[tuple[dist.ProcessGroup, list[int]]]:
    """Return, for each mesh axis with sharded tensors, the group of ranks along it and the indices of those tensors.

    Axes are in the order of the first tensor that needs them, thus the same on all ranks.
    """
    groups: dict[str, tuple[dist.ProcessGroup, list[int]]] = {}
    for i, layout in enumerate(layouts):
        if not is_dtensor(layout):
            continue
        for axis, placement in enumerate(layout.placements):
            if placement.is_partial():
                raise ValueError(
                    f"tensor {i} has no norm yet: it is {placement} on axis {axis} of {layout.device_mesh}"
                )
            # anything neither partial nor replicated is sharded: Shard, and _StridedShard, which is no Shard
            if placement.is_replicate() or layout.device_mesh.size(axis) == 1:
                continue
            group = layout.device_mesh.get_group(axis)
            groups.setdefault(group.group_name, (group, []))[1].append(i)
    return list(groups.values())
