"""The norm of the whole gradient, over all parts and shards, and clipping by it.

norm² = sum over pp of  sum over the shards of  |local gradient|²,   every element counted once
"""

from collections.abc import Iterable, Sequence

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.tensor import DTensor

from atoll.parallel.engine.axes import Axes
from atoll.training.optimizers.norms import local, norms


def gradients_of(parameters: Iterable[nn.Parameter]) -> list[torch.Tensor]:
    """Return the gradients of the parameters that have one."""
    return [parameter.grad for parameter in parameters if parameter.grad is not None]


@torch.no_grad()
def settle(parameters: Iterable[nn.Parameter], axes: Axes) -> None:
    """Bring each gradient into the placement of its parameter, where torch leaves that to the first use.

    If the sequence is sharded along tp, each rank's gradient of a norm's weight covers its tokens alone: one all-reduce
    sums them. `fully_shard` does all this by itself.
    """
    waiting: list[nn.Parameter] = []
    for parameter in parameters:
        gradient = parameter.grad
        if isinstance(parameter, DTensor) and isinstance(gradient, DTensor):
            if any(placement.is_partial() for placement in gradient.placements) and _is_replicated(parameter):
                waiting.append(parameter)
            elif gradient.placements != parameter.placements:
                parameter.grad = gradient.redistribute(placements=parameter.placements)
    if not waiting:
        return
    flat = torch.cat([local(parameter.grad).flatten() for parameter in waiting if parameter.grad is not None])
    dist.all_reduce(flat, group=axes.group("tp"))
    for parameter, summed in zip(waiting, flat.split([p.numel() for p in waiting]), strict=True):  # type: ignore[no-untyped-call]
        assert isinstance(parameter, DTensor)
        mesh, placements = parameter.device_mesh, parameter.placements
        parameter.grad = DTensor.from_local(summed.view(parameter.shape), mesh, placements, run_check=False)


def _is_replicated(parameter: DTensor) -> bool:
    return all(placement.is_replicate() for placement in parameter.placements)


@torch.no_grad()
def total_norm(gradients: Sequence[torch.Tensor], axes: Axes | None, device: torch.device) -> torch.Tensor:
    """Return the L2 norm of the gradient of the whole model, the same on every rank.

    It is float32; float64 if the whole gradient is float64.

    One all-reduce of a number for each tensor over each axis along which tensors are sharded, and of one number over
    pp.

    Args:
        gradients: the gradients of this rank, plain or DTensors; a tied weight once.
        axes: the axes of the mesh; None on a single device.
        device: the device of the result.
    """
    square = norms(gradients).to(device, torch.float64).square().sum()
    if axes is not None:
        axes.sum_over(square, "pp")
    is_double = bool(gradients) and all(gradient.dtype == torch.float64 for gradient in gradients)
    return square.sqrt().to(torch.float64 if is_double else torch.float32)


@torch.no_grad()
def clip(gradients: Iterable[torch.Tensor], norm: torch.Tensor, max_norm: float) -> None:
    """Scale the gradients in place by min(1, max_norm / (norm + 1e-6)), as `torch.nn.utils.clip_grad_norm_` does."""
    scale = torch.clamp(max_norm / (norm + 1e-6), max=1.0)
    shards = [local(gradient) for gradient in gradients]
    if shards:
        torch._foreach_mul_(shards, scale.to(shards[0].device))
