"""What a fork server of ranks loads, once for all of them: torch, and Atoll's part of a process group."""

PRELOAD = [
    "torch",
    "torch.distributed.checkpoint",
    "torch.distributed.fsdp",
    "torch.distributed.pipelining",
    "torch.distributed.tensor.parallel",
    "atoll.parallel.world",
]
"""The modules that the fork server imports before it forks."""

FROZEN = "atoll.ground.process.frozen"
"""The module that the fork server imports after all others."""


class RankFailed(RuntimeError):
    """A rank raised, died or did not end in time; the message has its traceback. The other ranks have been killed."""
