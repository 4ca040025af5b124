"""The mean of tensors over the ranks of a group: a few large all-reduces, begun now and awaited later.

All of it is elementwise, so a sharded parameter takes part with the local shard, and no tensor is ever whole.
"""

from collections.abc import Iterable, Mapping, Sequence

import torch
import torch.distributed as dist
from torch.distributed.tensor import DTensor

Parameters = Mapping[str, torch.Tensor]
"""Parameters (tensors or DTensors) by name, in the same order on every rank."""

BUCKET_BYTES = 1 << 25
"""Largest size of an all-reduce of several tensors of one dtype [bytes]; a larger tensor is reduced alone."""


def local_shards(parameters: Parameters) -> list[torch.Tensor]:
    """Return this rank's shard of each parameter: views that may be written."""
    shards = []
    for parameter in parameters.values():
        tensor = parameter.detach()
        shards.append(tensor.to_local() if isinstance(tensor, DTensor) else tensor)
    return shards


def like(parameter: torch.Tensor, shard: torch.Tensor) -> torch.Tensor:
    """Return a local shard of a tensor that is shaped as the parameter, as a DTensor that a checkpoint can reshard."""
    if not isinstance(parameter, DTensor):
        return shard
    return DTensor.from_local(
        shard,
        parameter.device_mesh,
        parameter.placements,
        run_check=False,
        shape=parameter.shape,
        stride=parameter.stride(),
    )


class PendingMean:
    """The mean over a group's ranks, in progress.

    Args:
        tensors: floats (or integers, with divisor 1), of the same shapes on every rank; free to change afterwards.
        group: the ranks.
        wire: the dtype that is sent, float16 or bfloat16 for half the bytes of float32; None: each tensor's dtype.
        divisor: the divisor of the sum; None: the number of ranks.
    """

    def __init__(
        self,
        tensors: Sequence[torch.Tensor],
        group: dist.ProcessGroup,
        wire: torch.dtype | None = None,
        divisor: int | None = None,
    ) -> None:
        self._tensors = [torch.empty_like(tensor) for tensor in tensors]
        self._divisor = group.size() if divisor is None else divisor
        self._buckets = list(_buckets(tensors))
        self._sent = [self._flat([tensors[i] for i in bucket], wire) for bucket in self._buckets]
        self._works = [dist.all_reduce(flat, group=group, async_op=True) for flat in self._sent]

    def wait(self) -> list[torch.Tensor]:
        """Return the means, when all ranks have sent theirs."""
        for bucket, flat, work in zip(self._buckets, self._sent, self._works, strict=True):
            work.wait()
            means = [self._tensors[i] for i in bucket]
            parts = torch.split(flat, [mean.numel() for mean in means])
            for mean, part in zip(means, parts, strict=True):
                mean.copy_(part.view_as(mean))
        return self._tensors

    def _flat(self, tensors: Sequence[torch.Tensor], wire: torch.dtype | None) -> torch.Tensor:
        flat = torch.cat([tensor.reshape(-1) for tensor in tensors])  # a copy, also of one
        if self._divisor != 1:
            flat /= self._divisor  # before the sum: a half overflows early
        return flat.to(wire or flat.dtype)


def average(tensors: Sequence[torch.Tensor], group: dist.ProcessGroup) -> None:
    """Replace each tensor by its mean over the group's ranks: the same bits on all of them."""
    for tensor, mean in zip(tensors, PendingMean(tensors, group).wait(), strict=True):
        tensor.copy_(mean)


def _buckets(tensors: Iterable[torch.Tensor]) -> Iterable[list[int]]:
    """Yield the indices of the tensors that are reduced together."""
    open_buckets: dict[torch.dtype, tuple[list[int], int]] = {}
    for index, tensor in enumerate(tensors):
        bucket, num_bytes = open_buckets.get(tensor.dtype, ([], 0))
        if bucket and num_bytes + tensor.nbytes > BUCKET_BYTES:
            yield bucket
            bucket, num_bytes = [], 0
        open_buckets[tensor.dtype] = [*bucket, index], num_bytes + tensor.nbytes
    yield from (bucket for bucket, _ in open_buckets.values())
