"""Scalar parameters under `fully_shard`, which takes none: replicas on every rank, with gradients that are summed here.

A scalar becomes a DTensor that is replicated over the mesh of the shards, so that optimizers, checkpoints and exports
treat it as any other parameter, with its name and shape (). A module reads its value as a plain tensor, through a
property. The gradient that a rank accumulates is the sum over its examples; `sum_scalars` adds up the ranks'.
"""

from collections.abc import Sequence
from typing import Any

import torch
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Replicate

from atoll.parallel.engine.axes import Axes
from atoll.training.optimizers.norms import local


def replicate_scalars(part: nn.Module, mesh: DeviceMesh) -> set[nn.Parameter]:
    """Replace each scalar parameter of a part by a replica on the mesh; a shared one stays shared.

    Args:
        part: the part of the model; plain, or with DTensors along tp.
        mesh: the mesh of the shards; under tp with tp as its last axis.

    Returns:
        The replicas, which `fully_shard` must ignore.
    """
    replicas: dict[int, nn.Parameter] = {}
    for module in list(part.modules()):
        scalars = {name: value for name, value in module._parameters.items() if value is not None and value.dim() == 0}
        for name, value in scalars.items():
            if id(value) not in replicas:
                replicas[id(value)] = _replica(value, mesh)
            module._parameters[name] = replicas[id(value)]
        if scalars:
            kind = type(module)
            properties = {
                name: _reading(name, value.device_mesh if isinstance(value, DTensor) else None, mesh.device_type)
                for name, value in scalars.items()
            }
            module.__class__ = type(kind.__name__, (kind,), {"__module__": kind.__module__, **properties})
    return set(replicas.values())


def _replica(value: nn.Parameter, mesh: DeviceMesh) -> nn.Parameter:
    whole = DTensor.from_local(local(value.detach()), mesh, [Replicate()] * mesh.ndim, run_check=False)
    return nn.Parameter(whole, requires_grad=value.requires_grad)


def _reading(name: str, tp: DeviceMesh | None, device: str) -> Any:
    """Return the property by which a module reads a scalar: a plain tensor, or under tp a DTensor of that axis."""

    def read(module: nn.Module) -> torch.Tensor:
        parameter = module._parameters[name]
        assert isinstance(parameter, DTensor)
        value: torch.Tensor = parameter.to_local()
        if value.device.type != device and not value.is_meta:  # offloaded
            value = value.to(device)
        return value if tp is None else DTensor.from_local(value, tp, [Replicate()], run_check=False)

    return property(read)


@torch.no_grad()
def sum_scalars(scalars: Sequence[nn.Parameter], axes: Axes, names: Sequence[str]) -> None:
    """Replace each scalar's gradient by the sum of the ranks': one small all-reduce over each axis.

    A rank without a gradient adds zero. A scalar without a gradient on every rank keeps none, as in a plain loop.

    Args:
        scalars: the trained replicas of this rank, in the same order on all ranks.
        axes: the axes of the mesh.
        names: the axes along which gradients are summed.
    """
    if not scalars:
        return
    gradients = [None if scalar.grad is None else local(scalar.grad) for scalar in scalars]
    flat = torch.stack(
        [
            torch.zeros((), dtype=torch.float64, device=local(scalar).device) if gradient is None else gradient.double()
            for scalar, gradient in zip(scalars, gradients, strict=True)
        ]
    )
    has_one = torch.tensor([gradient is not None for gradient in gradients], dtype=flat.dtype, device=flat.device)
    sums, numbers = axes.sum_over(torch.stack([flat, has_one]), *names)
    for scalar, total, number in zip(scalars, sums, numbers.tolist(), strict=True):
        assert isinstance(scalar, DTensor)
        value = total.to(scalar.dtype)
        scalar.grad = (
            DTensor.from_local(value, scalar.device_mesh, scalar.placements, run_check=False) if number else None
        )
