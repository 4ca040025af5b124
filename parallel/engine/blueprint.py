"""The blueprint of a model: its declaration of how it can be divided along every axis.

A model without a blueprint trains under data parallelism. Pipelines and tensor parallelism need the attribute
`blueprint`; a Hugging Face model is planned from itself (`huggingface.pipeline_plan`) and by transformers' plan of its
tensors (`huggingface.tensor_plan`):

    class Net(nn.Module):
        blueprint = Blueprint(chain=("embed", "layers", "head"), tensor=styles, divisible={"heads": 8})

A stage of a pipeline is the model itself with the modules of other stages replaced by the identity, so that its
`forward` is unchanged and parameters keep their names.
"""

import copy
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from itertools import chain, pairwise
from typing import TYPE_CHECKING

from torch import nn

from atoll.ground.printable import count_of
from atoll.parallel.huggingface.pipeline_plan import planned_chain
from atoll.parallel.huggingface.pipeline_stages import put_stand_ins
from atoll.parallel.huggingface.pipeline_trial import calls
from atoll.parallel.huggingface.tensor_plan import (
    divisible_by_tp,
    hugging_face_models,
    tensor_plan,
    tensor_plan_faults,
)

if TYPE_CHECKING:
    from torch.distributed.tensor.parallel import ParallelStyle

Styles = dict[str, "ParallelStyle"]
"""Torch's style of sharding by the module's name, in which `*` stands for any part."""

LIGHT = 0.1
"""The cost of a piece without parameters, such as an activation, relative to a block (1)."""

CONTAINERS = (nn.ModuleList, nn.ModuleDict, nn.Sequential)


@dataclass(frozen=True, slots=True, kw_only=True)
class Blueprint:
    """The declaration of how a model can be divided."""

    chain: Sequence[str] = ()
    """Names of the modules that `forward` calls one after another, each with the output of the one before as its only
    argument, a tensor. A container (ModuleList, ModuleDict, Sequential) stands for its items, which are the blocks."""

    is_planned: bool = False
    """The chain is that of a Hugging Face model, in the order of definition: its layers may take more than one
    argument, and a stage takes the inputs of the model, too (`huggingface.pipeline_plan`)."""

    tensor: Callable[[bool, bool], Styles] | None = None
    """(sequence_parallel, loss_parallel) -> the styles of tensor parallelism."""

    tensor_faults: Sequence[str] = ()
    """The reasons why tensor parallelism cannot divide the model, each with the way out."""

    divisible: Mapping[str, int] = field(default_factory=dict)
    """Numbers that tp must divide, such as the heads of an attention, by name."""

    sequence: int | None = None
    """The dimension of the inputs that sequence parallelism shards; tp must divide its length."""

    weights: Mapping[str, float] = field(default_factory=dict)
    """The cost of a piece relative to a block (1), by its name in the chain, for the cut into stages. A piece without
    parameters costs `LIGHT` unless it is named here."""


def blueprint_of(model: nn.Module) -> Blueprint:
    """Return the model's blueprint, or the default one of its class.

    The chain of an `nn.Sequential` is its children; the blueprint of a model of Hugging Face is planned from it.
    """
    declared = getattr(model, "blueprint", None)
    if isinstance(declared, Blueprint):
        return declared
    children = tuple(model._modules) if _is_row(model) else ()  # `named_children` omits the second name of a module
    planned = planned_chain(model)
    is_planned = bool(planned) and not children
    chained = Blueprint(
        chain=children or planned,
        is_planned=is_planned,
        weights=_planned_weights(model, planned) if is_planned else {},
    )
    if not (plan := tensor_plan(model)):
        return chained
    return replace(
        chained,
        tensor=lambda _sequence_parallel, _loss_parallel: _styles_of(plan),
        tensor_faults=tensor_plan_faults(model),
        divisible=divisible_by_tp(model),
    )


def _planned_weights(model: nn.Module, names: Sequence[str]) -> dict[str, float]:
    """Return the costs of the modules around the layers by their parameters; embedding tables are not counted."""
    modules = {name: model.get_submodule(name) for name in names}
    layers = [layer for module in modules.values() if isinstance(module, nn.ModuleList) for layer in module]
    of_layer = sum(map(_num_multiplied, layers)) / max(1, len(layers))
    return {
        name: max(LIGHT, _num_multiplied(module) / max(1.0, of_layer))
        for name, module in modules.items()
        if not isinstance(module, nn.ModuleList)
    }


def _num_multiplied(module: nn.Module) -> int:
    tables = {table.weight for table in module.modules() if isinstance(table, nn.Embedding)}
    return sum(parameter.numel() for parameter in module.parameters() if parameter not in tables)


def _styles_of(plan: Mapping[str, str]) -> Styles:
    """Return torch's styles of a plan of transformers; all results between its layers are plain tensors."""
    from torch.distributed.tensor import Replicate
    from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel

    styles: Styles = {
        "colwise": ColwiseParallel(),
        "colwise_gather_output": ColwiseParallel(output_layouts=Replicate()),
        "rowwise": RowwiseParallel(),
        "rowwise_split_input": RowwiseParallel(input_layouts=Replicate()),
        "embedding_rowwise": RowwiseParallel(input_layouts=Replicate()),
    }
    return {name: styles[kind] for name, kind in plan.items() if kind in styles}


def _is_row(module: nn.Module) -> bool:
    """Return whether a module does nothing but call its children one after another: no custom `forward` or hook."""
    is_row = isinstance(module, nn.Sequential) and type(module).forward is nn.Sequential.forward
    return is_row and not module._forward_hooks and not module._forward_pre_hooks


def _is_open(module: nn.Module) -> bool:
    """Return whether a container only holds its items, or calls them one after another."""
    is_list = isinstance(module, nn.ModuleList | nn.ModuleDict) and type(module).forward is nn.Module.forward
    return is_list or _is_row(module)


def pieces(model: nn.Module) -> list[str]:
    """Return the model's chain with its containers opened: names of modules in the order of their calls.

    A module may have several names; a container with several stays closed, since it cannot be divided between stages,
    and so does a Sequential with a custom `forward` or hooks.
    """
    declared = blueprint_of(model).chain
    modules = [model.get_submodule(name) for name in declared]
    names = []
    for name, module in zip(declared, modules, strict=True):
        if _is_open(module) and modules.count(module) == 1:
            names += [f"{name}.{item}" for item in module._modules]
        else:
            names.append(name)
    return names


def blocks(model: nn.Module) -> list[str]:
    """Return the names of the repeated parts of a model, each of which is sharded, recomputed and compiled by itself.

    They are the items of the containers in its chain; for a model without a chain the items of its outermost
    containers; for a Sequential its children. Only modules with parameters, each once.
    """
    declared = blueprint_of(model).chain
    if declared and not isinstance(model, nn.Sequential):
        names = [name for name in pieces(model) if name not in declared]
    else:
        names = list(_outermost_items(model))
    found: dict[nn.Module, str] = {}
    for name in names:
        module = model.get_submodule(name)
        if any(True for _ in module.parameters()):
            found.setdefault(module, name)
    return list(found.values())


def _outermost_items(module: nn.Module, prefix: str = "") -> Iterator[str]:
    for name, child in module.named_children():
        if isinstance(module, CONTAINERS) and not isinstance(child, nn.ModuleList | nn.ModuleDict):
            yield prefix + name
        else:
            yield from _outermost_items(child, f"{prefix}{name}.")


def cut(model: nn.Module, num_stages: int) -> list[list[str]]:
    """Return the pieces of each pipeline stage: runs of the chain whose heaviest is as light as possible.

    Each stage has something to train: a piece without trained parameters joins the one before it.

    Raises:
        ValueError: the model has no chain, uses a name or a tensor that cannot lie on one stage, or has fewer pieces to
            train than stages.
    """
    names, weights = pieces(model), blueprint_of(model).weights
    if not names:
        raise ValueError(_chainless(model))
    if model._forward_hooks or model._forward_pre_hooks:
        raise ValueError(
            f"{type(model).__name__} has forward hooks, which each stage would call: register them on a layer"
        )
    if twice := sorted({name for name in names if names.count(name) > 1}):
        raise ValueError(f"the chain has {', '.join(twice)} more than once; each call needs a separate name")
    earliest = 0
    if blueprint_of(model).is_planned:
        found = calls(model, names)
        names, earliest = found.names, found.earliest
    elif outside := _outside(model, names):
        raise ValueError(f"{', '.join(outside)} belong to no module of the chain, so every stage would use them")
    starts = [index for index, name in enumerate(names) if _is_trained(model.get_submodule(name))]
    starts = [*starts[:1], *(start for start in starts[1:] if start >= earliest)]
    if len(starts) < num_stages:
        trained = ", ".join(names[start] for start in starts)
        raise ValueError(
            f"{count_of(len(starts), 'layer')} ({trained}) cannot fill {count_of(num_stages, 'stage')} of a pipeline"
        )
    runs = [names[start:end] for start, end in pairwise([0, *starts[1:], len(names)])]
    costs = [sum(_cost(name, model, weights) for name in run) for run in runs]
    bounds = [0, *balanced(costs, num_stages), len(runs)]
    return [list(chain.from_iterable(runs[start:end])) for start, end in pairwise(bounds)]


def _chainless(model: nn.Module) -> str:
    """Return the reason why a model has no chain, with the way out."""
    kind = type(model).__name__
    if inside := [type(inner).__name__ for _, inner in hugging_face_models(model)]:
        what = kind if inside == [kind] else f"{kind} (around {', '.join(inside)})"
        return (
            f"a pipeline needs a chain, and {what} has none: a single list of layers, and all other state in modules "
            "beside it; use pp=1, or declare blueprint.chain in a model of your own; dp_shard divides every model"
        )
    why = "has a forward or hooks of its own" if isinstance(model, nn.Sequential) else "is no nn.Sequential"
    return f"a pipeline needs a chain: {kind} {why} and declares no blueprint.chain; declare it, or use pp=1"


def _cost(name: str, model: nn.Module, weights: Mapping[str, float]) -> float:
    has_parameters = any(True for _ in model.get_submodule(name).parameters())
    return weights.get(name, weights.get(name.rpartition(".")[0], 1.0 if has_parameters else LIGHT))


def _outside(model: nn.Module, names: Sequence[str]) -> list[str]:
    """Return the names of a model's parameters and buffers outside of the named modules."""
    tensors = [name for name, _ in (*model.named_parameters(), *model.named_buffers())]
    return [tensor for tensor in tensors if not any(tensor.startswith(f"{name}.") for name in names)]


def _is_trained(module: nn.Module) -> bool:
    return any(parameter.requires_grad for parameter in module.parameters())


def balanced(costs: Sequence[float], num_stages: int) -> list[int]:
    """Return the indices at which to cut costs into runs, none empty, so that the costliest run costs least.

    Dynamic programming over (runs, end): least[r][e] = min over s of max(least[r - 1][s], cost of s..e). Among equals
    the latest cut.
    """
    total = [0.0]
    for cost in costs:
        total.append(total[-1] + cost)
    least = {(1, end): (total[end], 0) for end in range(1, len(costs) + 1)}
    for runs in range(2, num_stages + 1):
        for end in range(runs, len(costs) + 1):
            least[runs, end] = min(
                (max(least[runs - 1, start][0], total[end] - total[start]), -start) for start in range(runs - 1, end)
            )
    cuts: list[int] = []
    end = len(costs)
    for runs in range(num_stages, 1, -1):
        end = -int(least[runs, end][1])
        cuts.append(end)
    return cuts[::-1]


def stage(model: nn.Module, keep: Sequence[str], taken: Collection[nn.Parameter] = ()) -> nn.Module:
    """Return a stage: the model in which every other piece of its chain is the identity.

    The pieces that it keeps are the model's objects, with what is attached to them or refers to them: hooks, attributes
    of parameters, a layer that holds another's weight. What is around them is a copy.

    Args:
        model: the whole model.
        keep: the pieces of the stage.
        taken: the parameters of other stages on this rank; a stage with one of them is a copy.
    """
    blueprint, names = blueprint_of(model), pieces(model)
    kept = [model.get_submodule(name) for name in keep]
    others = {name: model.get_submodule(name) for name in names if name not in keep}
    needed = {module for piece in kept for module in piece.modules()}
    memo: dict[int, object] = {id(module): nn.Identity() for module in others.values() if module not in needed}
    if not any(parameter in taken for piece in kept for parameter in piece.parameters()):
        memo |= {id(one): one for piece in kept for one in (*piece.modules(), *piece.parameters(), *piece.buffers())}
    part = copy.deepcopy(model, memo)
    for name, parameter in part.named_parameters():
        vars(parameter).update(vars(model.get_parameter(name)))
    if blueprint.is_planned:
        part.blueprint = blueprint  # type: ignore[assignment]  # ties and cuts are those of the whole model
        put_stand_ins(part, model, calls(model, names), keep)
        return part
    for name in others:  # a module with several names may be kept under one and not under another
        part.set_submodule(name, nn.Identity())
    return part
