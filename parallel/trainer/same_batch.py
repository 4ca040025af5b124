"""The comparison of the batches on the ranks of one pipeline and tensor group, which must read the same data."""

import zlib
from collections.abc import Iterable, Iterator
from typing import Any

import torch
import torch.distributed as dist

from atoll.parallel.data.batch import Batch, tensors
from atoll.parallel.engine.axes import Axes
from atoll.task.errors import TaskBroken

FIRST = 4
"""The number of first batches that are all compared; after them those whose number is a power of two."""


class SameBatch:
    """A count of the batches, and the comparison of those that are due: the first four, the 8th, the 16th and so on.

    Args:
        axes: the axes of the mesh; None on a single device.
    """

    def __init__(self, axes: Axes | None) -> None:
        self._axes = axes if axes is not None and axes.mesh.pp * axes.mesh.tp > 1 else None
        self._seen = 0

    def checked(self, batches: Iterable[Batch]) -> Iterator[Batch]:
        """Yield the batches; compare those that are due among the ranks."""
        for batch in batches:
            self.check(batch)
            yield batch

    def check(self, batch: Batch) -> None:
        """Compare a batch, if it is due; every rank calls it for each of its batches.

        Raises:
            TaskBroken: the ranks with the same dp coordinates have different batches; on all of these ranks.
        """
        self._seen += 1
        if self._axes is None or (self._seen > FIRST and self._seen & (self._seen - 1)):
            return
        found = checksum(batch)
        both = torch.tensor([found, -found], device=self._axes.device_mesh.device_type)  # the largest, minus the least
        for axis in ("tp", "pp"):
            if self._axes.mesh.degrees[axis] > 1:
                dist.all_reduce(both, dist.ReduceOp.MAX, group=self._axes.group(axis))
        largest, least = int(both[0]), -int(both[1])
        if largest != least:
            mesh = self._axes.mesh
            raise TaskBroken(
                f"batch {self._seen}: the ranks of one pipeline or tensor group (pp={mesh.pp}, tp={mesh.tp}) have read "
                "different data for the same examples, so inputs and targets would not belong together; a data set "
                "must return the same for the same index on every rank: let it draw random numbers from torch's, "
                "numpy's or Python's global generator (which are seeded for each example), and not from the clock, "
                "the operating system or a generator that each rank seeds for itself"
            )


def checksum(batch: Batch) -> int:
    """Return a checksum of a batch's tensors, shapes and units, in [0, 2^32)."""
    found = zlib.crc32(str(batch.count).encode())
    for tensor in tensors((batch.inputs, batch.targets)):
        found = zlib.crc32(f"{tensor.dtype} {tuple(tensor.shape)}".encode(), found)
        found = zlib.crc32(_bytes(tensor), found)
    return found


def _bytes(tensor: torch.Tensor) -> Any:
    return tensor.detach().cpu().contiguous().flatten().view(torch.uint8).numpy()
