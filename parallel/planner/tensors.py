"""A rank's part of a custom model, of which the planner knows the tensors, but no shape of a decoder."""

from math import prod

from torch import nn
from torch.distributed.tensor.parallel import ColwiseParallel, ParallelStyle, RowwiseParallel

from atoll.parallel.engine.blueprint import blocks, blueprint_of
from atoll.parallel.engine.plan import Plan
from atoll.parallel.engine.sharding import matching, separable
from atoll.parallel.planner.shape import Weight
from atoll.parallel.planner.units import Share, joined, unit


def share_of(model: nn.Module, plan: Plan) -> Share:
    """Return the part of rank 0, which has the longest shards.

    Args:
        model: the whole one, with memory or on meta.
        plan: without a pipeline.
    """
    names, cuts = separable(model, blocks(model)), _cuts(model, plan)
    units: dict[str, list[Weight]] = {name: [] for name in (*names, "")}
    for name, parameter in model.named_parameters():
        weight = Weight(name, tuple(parameter.shape) or (1,), cuts.get(name))
        units[next((block for block in names if name.startswith(f"{block}.")), "")].append(weight)
    parts = {name: unit(weights, plan.mesh.tp, plan.mesh.dp_shard, 0) for name, weights in units.items() if weights}
    return joined([part for name, part in parts.items() if name], [parts[""]] if "" in parts else [])


def trained_fraction(model: nn.Module) -> float:
    """Return the elements of trained parameters, as a fraction of all."""
    sizes = [(prod(parameter.shape), parameter.requires_grad) for parameter in model.parameters()]
    return sum(size for size, is_trained in sizes if is_trained) / max(sum(size for size, _ in sizes), 1)


def _cuts(model: nn.Module, plan: Plan) -> dict[str, int]:
    """Return the axis along which tensor parallelism cuts a parameter, by its name."""
    declared = blueprint_of(model).tensor
    if plan.mesh.tp == 1 or declared is None:
        return {}
    found = {}
    for name, style in matching(model, declared(plan.sequence_parallel, plan.loss_parallel)).items():
        module = model.get_submodule(name)
        for own, parameter in module.named_parameters(recurse=False):
            axis = _axis(style, isinstance(module, nn.Embedding))
            if axis is not None and axis < parameter.ndim:
                found[f"{name}.{own}"] = axis
    return found


def _axis(style: ParallelStyle, is_table: bool) -> int | None:
    """Return the axis of a weight that a style cuts; a table of embeddings is the transposed matrix of a layer."""
    if isinstance(style, ColwiseParallel):
        return 1 if is_table else 0
    return (0 if is_table else 1) if isinstance(style, RowwiseParallel) else None
