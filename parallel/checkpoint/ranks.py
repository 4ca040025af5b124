"""What the ranks tell each other about a checkpoint: JSON, so that nothing is unpickled, and all of them fail alike."""

import json
from collections.abc import Sequence
from typing import Any

import torch
import torch.distributed as dist

from atoll.parallel.checkpoint.errors import listed


class Ranks:
    """The ranks of the default process group, or this process alone where there is none.

    Made on every rank at the same point; used by one thread. Its gloo group is its own, so that what it says crosses
    no other collective, and works beside NCCL.
    """

    def __init__(self) -> None:
        self.group: Any = dist.new_group(backend="gloo") if dist.is_initialized() else None
        self.rank = dist.get_rank() if self.group else 0
        self.size = dist.get_world_size() if self.group else 1

    @property
    def is_first(self) -> bool:
        """Whether this is rank 0, which writes what there is once."""
        return self.rank == 0

    def gather(self, value: Any) -> list[Any]:
        """What each rank says, in their order; every rank must call it."""
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

    def insist(self, faults: Sequence[str], error: type[Exception]) -> None:
        """Raise `error` on every rank if any has found a fault; the message lists the faults of all."""
        found = [fault for of_rank in self.gather(list(faults)) for fault in of_rank]
        if found:
            raise error(listed(found))

    def close(self) -> None:
        """Give the group back."""
        if self.group is not None:
            dist.destroy_process_group(self.group)
            self.group = None
