"""The norm of the whole gradient, wherever its parts lie, and clipping by it.

norm² = sum over pp of  sum over the shards of  |local gradient|²,   every element counted once
"""

from collections import defaultdict
from collections.abc import Iterable

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.tensor import DTensor

from atoll.parallel.engine.mesh import Axes


def local(tensor: torch.Tensor) -> torch.Tensor:
    """What this rank holds of a tensor."""
    return tensor.to_local() if isinstance(tensor, DTensor) else tensor


def gradients_of(parameters: Iterable[nn.Parameter]) -> list[torch.Tensor]:
    """The gradients that there are."""
    return [parameter.grad for parameter in parameters if parameter.grad is not None]


@torch.no_grad()
def settle(parameters: Iterable[nn.Parameter], axes: Axes) -> None:
    """Bring each gradient into the placement of its parameter, where torch leaves that to the first use.

    Where the sequence is cut along tp, each rank's gradient of a norm's weight is that of its tokens: those are added
    up in one all-reduce. `fully_shard` does all this by itself.
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
def total_norm(gradients: Iterable[torch.Tensor], axes: Axes | None, device: torch.device) -> torch.Tensor:
    """The L2 norm of the gradient of the whole model, float32, the same on every rank.

    One all-reduce of a handful of numbers for each axis that something is sharded over, and one over pp.

    Args:
        gradients: that this rank holds, plain or DTensors; a tied weight once.
        axes: of the mesh; None on a single device.
        device: where the result goes.
    """
    by_shards: dict[tuple[str, ...], list[torch.Tensor]] = defaultdict(list)
    for gradient in gradients:
        by_shards[_shards(gradient)].append(local(gradient))
    keys = sorted(by_shards)
    squares = torch.zeros(max(1, len(keys)), dtype=torch.float64, device=device)
    for index, key in enumerate(keys):
        norms = torch.stack(torch._foreach_norm(by_shards[key]))
        squares[index] = norms.to(squares.device, torch.float64).square().sum()
    if axes is not None:
        squares = _summed(squares, keys, axes)
    return squares.sum().sqrt().to(torch.float32)


def _summed(squares: torch.Tensor, keys: list[tuple[str, ...]], axes: Axes) -> torch.Tensor:
    for axis in ("tp", "dp_shard", "dp_replicate"):
        mine = torch.tensor([axis in sharded for sharded in keys] or [False], device=squares.device)
        if axes.mesh.degrees[axis] > 1 and bool(mine.any()):
            summed = squares.clone()
            dist.all_reduce(summed, group=axes.group(axis))
            squares = torch.where(mine, summed, squares)
    total = squares.sum().reshape(1)
    return axes.sum_over(total, "pp")


def _shards(gradient: torch.Tensor) -> tuple[str, ...]:
    """Over which axes the elements of a gradient are distributed."""
    if not isinstance(gradient, DTensor):
        return ()
    names = gradient.device_mesh.mesh_dim_names or ()
    if any(placement.is_partial() for placement in gradient.placements):
        raise ValueError(f"a gradient is not yet added up: {gradient.placements} over {names}")
    sharded = [name for name, placement in zip(names, gradient.placements, strict=True) if not placement.is_replicate()]
    return tuple(sharded)


@torch.no_grad()
def clip(gradients: Iterable[torch.Tensor], norm: torch.Tensor, max_norm: float) -> None:
    """Scale the gradients in place by min(1, max_norm / (norm + 1e-6)), as `torch.nn.utils.clip_grad_norm_` does."""
    scale = torch.clamp(max_norm / (norm + 1e-6), max=1.0)
    shards = [local(gradient) for gradient in gradients]
    if shards:
        torch._foreach_mul_(shards, scale.to(shards[0].device))
