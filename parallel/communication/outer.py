"""Replicas that do not average their gradients in every step: the methods, and the hooks that a train loop calls.

    before_step, the inner optimizer's step, after_step;   flush before an evaluation, a checkpoint and the end

The replicas are the ranks of a group (the axis `dp_replicate`). Each has a separate inner optimizer, whose state
is never sent. Between two synchronizations the replicas' weights differ: `flush` makes them one model again.
"""

from collections.abc import Mapping
from typing import Protocol

import torch
import torch.distributed as dist

from atoll.parallel.communication.delayed import DelayedAveraging
from atoll.parallel.communication.diloco import DiLoCo
from atoll.parallel.communication.local_sgd import LocalSgd
from atoll.parallel.communication.means import Parameters
from atoll.parallel.communication.outer_config import OuterConfig

DTYPES = {"fp32": None, "fp16": torch.float16, "bf16": torch.bfloat16}
"""The dtype of the pseudo-gradients by the value of `wire`."""


class Outer(Protocol):
    """Method of synchronizing replicas now and then; all ranks of the group call the same methods in the same order."""

    def before_step(self, parameters: Parameters) -> None:
        """Prepare the inner optimizer's step, after the gradients are there."""

    def after_step(self, parameters: Parameters, step: int) -> None:
        """Synchronize the replicas after the inner optimizer's step of this number (0-based), if it is due."""

    def flush(self, parameters: Parameters) -> None:
        """Make the replicas one model, with the same bits on each: apply all pending means."""

    def state(self, parameters: Parameters) -> dict[str, torch.Tensor]:
        """Return the tensors to save beside the parameters, sharded like them.

        Raises:
            RuntimeError: it is not called right after `flush`.
        """

    def load_state(self, state: Mapping[str, torch.Tensor], parameters: Parameters) -> None:
        """Restore the method's state from a checkpoint, whose parameters have been loaded already."""


def make_outer(config: OuterConfig, group: dist.ProcessGroup) -> Outer:
    """Return the method for the replicas of a group, whose parameters must be equal when the first step begins."""
    match config.method:
        case "local_sgd":
            return LocalSgd(group, every=config.steps)
        case "diloco":
            return DiLoCo(group, every=config.steps, lr=config.lr, momentum=config.momentum, wire=DTYPES[config.wire])
        case _:
            return DelayedAveraging(group, delay=config.steps, correction=config.correction)
