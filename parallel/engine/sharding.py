"""The sharding of a part of the model over the ranks: tensor parallelism first, data parallelism around it.

The order is torch's: cut into stages, tensor parallelism, recomputation, compilation, `fully_shard`.
"""

import warnings
from collections.abc import Collection
from fnmatch import fnmatchcase
from typing import Any

import torch
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import CPUOffloadPolicy, FSDPModule, MixedPrecisionPolicy, fully_shard
from torch.distributed.tensor import DTensor, Replicate, distribute_module
from torch.distributed.tensor.parallel import ColwiseParallel, ParallelStyle, RowwiseParallel, parallelize_module
from torch.nn.parallel import DistributedDataParallel

from atoll.parallel.data.batch import map_tensors
from atoll.parallel.engine.axes import Axes
from atoll.parallel.engine.blueprint import Styles, blueprint_of
from atoll.parallel.engine.flags import keep_flags
from atoll.parallel.engine.plan import Plan
from atoll.parallel.engine.precision import gather_as_autocast
from atoll.parallel.engine.scalars import replicate_scalars
from atoll.parallel.engine.ties import tied_names

DTYPES = {"fp32": torch.float32, "bf16": torch.bfloat16}
"""Torch's dtypes by the names of `Plan.precision`."""


class Replicated(ParallelStyle):
    """The style of a module that all ranks of a tensor-parallel group compute alike; its parameters become DTensors.

    The optimizers and the clipping process many tensors at once, and refuse plain tensors among DTensors.
    """

    def _apply(self, module: nn.Module, device_mesh: DeviceMesh) -> nn.Module:
        return distribute_module(
            module,
            device_mesh,
            input_fn=lambda _module, inputs, mesh: map_tensors(lambda value: _as_replica(value, mesh), inputs),
            output_fn=lambda _module, outputs, _mesh: map_tensors(_as_local, outputs),
        )


def _as_replica(value: torch.Tensor, mesh: DeviceMesh) -> torch.Tensor:
    return value if isinstance(value, DTensor) else DTensor.from_local(value, mesh, (Replicate(),), run_check=False)


def _as_local(value: torch.Tensor) -> torch.Tensor:
    return value.to_local() if isinstance(value, DTensor) else value


def apply_tensor_parallel(part: nn.Module, mesh: DeviceMesh, plan: Plan) -> None:
    """Shard a part's layers along `tp` by its blueprint; every other module is replicated.

    Raises:
        ValueError: the model declares no styles.
    """
    declared = blueprint_of(part).tensor
    if declared is None:
        raise ValueError(
            f"tp={plan.mesh.tp}: {type(part).__name__} declares no blueprint.tensor, so it cannot be sharded"
        )
    tied = tied_names(part)
    frozen = [name for name, parameter in part.named_parameters(remove_duplicate=False) if not parameter.requires_grad]
    found = matching(part, declared(plan.sequence_parallel, plan.loss_parallel))
    for name, style in found.items():
        parallelize_module(part.get_submodule(name) if name else part, mesh, style)
    for module in list(part.modules()):
        if any(not isinstance(parameter, DTensor) for parameter in module.parameters(recurse=False)):
            parallelize_module(module, mesh, Replicated())
    for names in tied:
        _tie(part, names)
    for name in frozen:  # some of torch's styles make new parameters, which would be trained
        part.get_parameter(name).requires_grad_(False)


def matching(part: nn.Module, styles: Styles) -> Styles:
    """Return the styles by the full names of existing modules; a module of another stage is an `nn.Identity` here."""
    found: Styles = {}
    for pattern, style in styles.items():
        for name, module in part.named_modules():
            if (
                fnmatchcase(name, pattern)
                and name.count(".") == pattern.count(".")
                and not isinstance(module, nn.Identity)
            ):
                found[name] = style
    return found


def unmatched(model: nn.Module, styles: Styles) -> list[str]:
    """Return the patterns of a whole model's styles that match no module."""
    return [pattern for pattern, style in styles.items() if not matching(model, {pattern: style})]


def nested(model: nn.Module, styles: Styles) -> list[str]:
    """Return the parameters of styled layers that lie in modules below them, as those of a parametrization do."""
    layers = [
        (name, model.get_submodule(name))
        for name, style in matching(model, styles).items()
        if isinstance(style, ColwiseParallel | RowwiseParallel)
    ]
    return [f"{name}.{inner}" for name, layer in layers for inner, _ in layer.named_parameters() if "." in inner]


def _tie(part: nn.Module, names: list[str]) -> None:
    """Tie parameters again that were sharded separately.

    Raises:
        ValueError: they were sharded in different ways.
    """
    first = part.get_parameter(names[0])
    for name in names[1:]:
        other = part.get_parameter(name)
        if isinstance(first, DTensor) and isinstance(other, DTensor) and first.placements != other.placements:
            raise ValueError(
                f"tied weights {names[0]} and {name} are sharded differently along tp: "
                f"{first.placements} and {other.placements}"
            )
        parent, _, attribute = name.rpartition(".")
        setattr(part.get_submodule(parent), attribute, first)


def apply_data_parallel(
    part: nn.Module, axes: Axes, plan: Plan, block_names: list[str], borrowed: Collection[str] = ()
) -> nn.Module:
    """Wrap a part so that its gradients are summed over the ranks with different data, by `fully_shard` or DDP.

    Gradients are sums: each rank's loss is already weighted by its share of the units.
    """
    if plan.is_ddp:
        return _ddp(part, axes)
    if not plan.is_sharded:
        return part
    mesh, precision = _data_mesh(axes, plan), _precision(plan)
    options: dict[str, Any] = {
        "mesh": mesh,
        "ignored_params": replicate_scalars(part, _whole_mesh(axes, mesh)),
        "reshard_after_forward": plan.zero_stage == 3,
        "mp_policy": precision,
    }
    if plan.offload:
        options["offload_policy"] = CPUOffloadPolicy(pin_memory=axes.device_mesh.device_type == "cuda")
    for name in separable(part, block_names, borrowed):
        fully_shard(part.get_submodule(name), **options)
    if borrowed:  # also by what the pass returns, for the loss
        options["reshard_after_forward"] = False
    fully_shard(part, **options)
    if plan.precision != "fp32" and blueprint_of(part).sequence is None:
        gather_as_autocast(part)
    for module in part.modules():
        if isinstance(module, FSDPModule):
            module.set_gradient_divide_factor(1.0)
            module.set_force_sum_reduction_for_comms(True)  # gloo supports no other; with factor 1 it is free
    keep_flags(part)
    return part


def separable(part: nn.Module, block_names: list[str], borrowed: Collection[str] = ()) -> list[str]:
    """Return the blocks that `fully_shard` may gather by themselves, for their calls.

    Not those with a parameter that lies in another module, too, or that is used outside of their calls (`borrowed`).
    """
    tied = tied_names(part)

    def isseparable(block: str) -> bool:
        return all(len({name.startswith(f"{block}.") for name in names}) == 1 for names in tied)

    return [block for block in block_names if block not in borrowed and isseparable(block)]


def _data_mesh(axes: Axes, plan: Plan) -> DeviceMesh:
    """Return the mesh of `fully_shard`: two-dimensional if there are copies of shards, to sum across copies."""
    if axes.mesh.dp_replicate > 1 and plan.outer == "none":
        return axes.device_mesh["dp_replicate", "dp_shard"]
    return axes.device_mesh["dp_shard"]


def _whole_mesh(axes: Axes, data: DeviceMesh) -> DeviceMesh:
    """Return the mesh of a parameter that is sharded over the data mesh and lies on tp."""
    assert data.mesh_dim_names is not None
    return data if axes.mesh.tp == 1 else axes.device_mesh[(*data.mesh_dim_names, "tp")]


def _precision(plan: Plan) -> MixedPrecisionPolicy:
    if plan.precision == "fp32" and plan.reduce_dtype == "fp32":
        return MixedPrecisionPolicy()
    return MixedPrecisionPolicy(
        param_dtype=DTYPES[plan.precision] if plan.precision != "fp32" else None,
        reduce_dtype=DTYPES[plan.reduce_dtype],
        cast_forward_inputs=False,  # `passes.casting` does, where one process does
    )


def _as_results(_module: nn.Module, _inputs: Any, outputs: Any) -> Any:
    """Return outputs in which a parameter, such as a weight of the loss, is a result of the pass.

    DDP follows results back to the parameters that a pass has used; a parameter itself would seem unused.
    """
    return map_tensors(lambda tensor: tensor.view_as(tensor) if isinstance(tensor, nn.Parameter) else tensor, outputs)


def _ddp(part: nn.Module, axes: Axes) -> DistributedDataParallel:
    part.register_forward_hook(_as_results)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", FutureWarning)  # the later name of broadcast_buffers is not in torch 2.11
        return DistributedDataParallel(
            part,
            process_group=axes.group("dp_replicate"),
            gradient_as_bucket_view=True,
            find_unused_parameters=True,  # an expert that no example of this rank has chosen counts as zeros
            broadcast_buffers=False,  # `average_buffers` makes them equal before they are used
        )


def whole(tensor: torch.Tensor) -> torch.Tensor:
    """Return the full tensor of a DTensor, on every rank of its mesh (a collective); a plain tensor unchanged."""
    return tensor.full_tensor() if isinstance(tensor, DTensor) else tensor
