"""The changes of the gradients of a step that an algorithm makes, on the shards of the parameters."""

from collections.abc import Callable, Sequence

import torch

from atoll.parallel.mesh_client.building import Shard
from atoll.training.optimizers.norms import local


def pull(shards: Sequence[Shard], mu: float) -> Callable[[], None]:
    """Return FedProx's change: μ (w - w_global) is added to each gradient (Li et al. 2020, Algorithm 2).

    Args:
        shards: with the global values; they are copied.
        mu: μ.
    """
    starts = [local(shard.parameter.detach()).clone() for shard in shards]

    @torch.no_grad()
    def amend() -> None:
        for shard, start in zip(shards, starts, strict=True):
            parameter = shard.parameter
            if parameter.grad is not None:
                local(parameter.grad).add_(local(parameter.detach()) - start, alpha=mu)

    return amend


def in_turn(first: Callable[[], None] | None, second: Callable[[], None]) -> Callable[[], None]:
    """Return the change that applies both, one after the other."""

    def amend() -> None:
        if first is not None:
            first()
        second()

    return amend


def correct(shards: Sequence[Shard], corrections: Sequence[torch.Tensor]) -> Callable[[], None]:
    """Return SCAFFOLD's change: c - c_i is added to each gradient (`training.local.scaffold`).

    Args:
        shards: of the trained parameters.
        corrections: c - c_i of each, of its shape.
    """

    @torch.no_grad()
    def amend() -> None:
        for shard, correction in zip(shards, corrections, strict=True):
            parameter = shard.parameter
            if parameter.grad is None:  # no part of this loss: its gradient is zero
                parameter.grad = torch.zeros_like(parameter)
            local(parameter.grad).add_(correction)

    return amend
