"""The axes of a mesh on the ranks of a process group: the coordinates of this rank, and its groups."""

from collections.abc import Mapping
from functools import cached_property

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh

from atoll.parallel.engine.mesh import AXES, Mesh


class Axes:
    """The mesh on the ranks of the default process group: this rank's coordinates and its groups.

    Args:
        mesh: a mesh with the same number of ranks as the process group.
        device: `cpu` or `cuda`.

    Raises:
        ValueError: the mesh and the process group differ in size.
    """

    def __init__(self, mesh: Mesh, device: str) -> None:
        mesh.check_world(dist.get_world_size())
        self.mesh = mesh
        self.device_mesh: DeviceMesh = init_device_mesh(device, tuple(mesh.degrees.values()), mesh_dim_names=AXES)
        self.coordinates: Mapping[str, int] = {axis: self.device_mesh.get_local_rank(axis) for axis in AXES}

    @property
    def dp_rank(self) -> int:
        """The index of this rank's part of each global batch, among `mesh.dp`: dp_replicate x dp_shard, row-major."""
        return self.coordinates["dp_replicate"] * self.mesh.dp_shard + self.coordinates["dp_shard"]

    @property
    def draw(self) -> int:
        """The index of this rank's random numbers: different where data or layers differ, the same along tp.

        Ranks of a tensor-parallel group compute the same numbers wherever a module is replicated.
        """
        return self.dp_rank + self.mesh.dp * self.coordinates["pp"]

    @cached_property
    def dp_group(self) -> dist.ProcessGroup:
        """The ranks with different data. All ranks of the mesh first read it at the same point: it may create them."""
        for axis, other in (("dp_replicate", "dp_shard"), ("dp_shard", "dp_replicate")):
            if self.mesh.degrees[other] == 1:
                return self.group(axis)
        planes = self.device_mesh.mesh.permute(0, 3, 1, 2).reshape(-1, self.mesh.dp).tolist()
        groups = [dist.new_group(ranks) for ranks in planes]
        found: dist.ProcessGroup = groups[[dist.get_rank() in ranks for ranks in planes].index(True)]
        return found

    def group(self, axis: str) -> dist.ProcessGroup:
        """Return the ranks that differ from this one only in their coordinate on the axis."""
        return self.device_mesh.get_group(axis)

    def sum_over(self, tensor: torch.Tensor, *axes: str) -> torch.Tensor:
        """Sum the ranks' tensors over some axes, in place; axes of one rank cost nothing."""
        for axis in axes:
            if self.mesh.degrees[axis] > 1:
                dist.all_reduce(tensor, group=self.group(axis))
        return tensor
