"""The communication of ranks about a checkpoint: JSON, so that nothing is unpickled, and a fault fails all of them."""

import json
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist

from atoll.parallel.checkpoint.errors import listed

PATIENCE_S = 86400.0
"""Longest wait for a rank that reads files of any size [s]."""


class Ranks:
    """The ranks of the default process group, or this process alone without one.

    Every rank constructs it at the same point; one thread uses it. It has a separate gloo group, so that it crosses
    no other collective, and works beside NCCL.

    Args:
        timeout_s: longest wait for another rank [s]; None: the timeout of all groups (`world.process_group`).
    """

    def __init__(self, timeout_s: float | None = None) -> None:
        wait = None if timeout_s is None else timedelta(seconds=timeout_s)
        self.group: Any = dist.new_group(backend="gloo", timeout=wait) if dist.is_initialized() else None
        self.rank = dist.get_rank() if self.group else 0
        self.size = dist.get_world_size() if self.group else 1

    @property
    def is_first(self) -> bool:
        """Whether this process is rank 0, which writes everything that exists once."""
        return self.rank == 0

    def gather(self, value: Any) -> list[Any]:
        """Return the values of all ranks, in their order; every rank must call it."""
        text = json.dumps(value).encode()
        if self.group is None:
            return [json.loads(text)]
        sizes = [torch.zeros(1, dtype=torch.int64) for _ in range(self.size)]
        dist.all_gather(sizes, torch.tensor([len(text)]), group=self.group)
        longest = max(int(size) for size in sizes)
        texts = [torch.empty(longest, dtype=torch.uint8) for _ in range(self.size)]
        padded = torch.frombuffer(bytearray(text.ljust(longest)), dtype=torch.uint8)
        dist.all_gather(texts, padded, group=self.group)
        return [json.loads(text.numpy().tobytes()) for text in texts]

    def raise_if_any(self, faults: Sequence[str], error: type[Exception]) -> None:
        """Raise `error` on every rank if any has found a fault; the message lists the faults of all."""
        found = [fault for rank_faults in self.gather(list(faults)) for fault in rank_faults]
        if found:
            raise error(listed(found))

    def close(self) -> None:
        """Destroy the process group of these ranks."""
        if self.group is not None:
            dist.destroy_process_group(self.group)
            self.group = None


@contextmanager
def patient_ranks() -> Iterator[Ranks]:
    """Provide ranks that wait a day for each other, while some of them read large files; every rank must call it.

    The death of a rank closes its connections, so that the others still notice it at once.
    """
    ranks = Ranks(PATIENCE_S)
    try:
        yield ranks
    finally:
        ranks.close()
