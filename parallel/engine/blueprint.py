"""What a model says of itself, so that it can be cut along every axis.

A model says nothing and trains at once under data parallelism. It says more through an attribute `blueprint`:

    class Net(nn.Module):
        blueprint = Blueprint(chain=("embed", "layers", "head"), tensor=styles, divisible={"heads": 8})

A stage of a pipeline is the model itself in which whatever belongs to other stages does nothing (`nn.Identity`), so
that its `forward` is untouched and parameters keep their names.
"""

import copy
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import pairwise

from torch import nn
from torch.distributed.tensor.parallel import ParallelStyle

Styles = dict[str, ParallelStyle]
"""By the module's name, in which `*` stands for any part: how torch cuts it."""

LIGHT = 0.1
"""What a piece without parameters costs, such as an activation, beside a block (1)."""

CONTAINERS = (nn.ModuleList, nn.ModuleDict, nn.Sequential)


@dataclass(frozen=True, slots=True, kw_only=True)
class Blueprint:
    """How a model can be cut."""

    chain: Sequence[str] = ()
    """Names of the modules that `forward` calls one after another, each with nothing but what the one before returns.
    A container (ModuleList, ModuleDict, Sequential) stands for its items, which are the blocks."""

    tensor: Callable[[bool, bool], Styles] | None = None
    """(sequence_parallel, loss_parallel) -> the styles of tensor parallelism."""

    divisible: Mapping[str, int] = field(default_factory=dict)
    """By name: numbers that tp must divide, such as the heads of an attention."""

    weights: Mapping[str, float] = field(default_factory=dict)
    """By name in the chain: what a piece costs beside a block (1), for the cut into stages. Without parameters it is
    light unless it is named here."""


def blueprint_of(model: nn.Module) -> Blueprint:
    """What the model says; of an `nn.Sequential` that says nothing, that its children are its chain."""
    declared = getattr(model, "blueprint", None)
    if isinstance(declared, Blueprint):
        return declared
    if isinstance(model, nn.Sequential):
        return Blueprint(chain=tuple(name for name, _ in model.named_children()))
    return Blueprint()


def pieces(model: nn.Module) -> list[str]:
    """The model's chain with its containers opened: names of modules in the order in which they are called."""
    names = []
    for name in blueprint_of(model).chain:
        module = model.get_submodule(name)
        if isinstance(module, CONTAINERS):
            names += [f"{name}.{item}" for item, _ in module.named_children()]
        else:
            names.append(name)
    return names


def blocks(model: nn.Module) -> list[str]:
    """The repeated parts of a model, each of which is sharded, recomputed and compiled by itself.

    The items of the containers in its chain; of a model without a chain the items of its outermost containers; of a
    Sequential its own children. Only what holds parameters.
    """
    chain = blueprint_of(model).chain
    if chain and not isinstance(model, nn.Sequential):
        names = [name for name in pieces(model) if name not in chain]
    else:
        names = list(_outermost_items(model))
    return [name for name in names if any(True for _ in model.get_submodule(name).parameters())]


def _outermost_items(module: nn.Module, prefix: str = "") -> Iterator[str]:
    for name, child in module.named_children():
        if isinstance(module, CONTAINERS):
            yield prefix + name
        else:
            yield from _outermost_items(child, f"{prefix}{name}.")


def cut(model: nn.Module, num_stages: int) -> list[list[str]]:
    """Which pieces each stage of a pipeline has: runs of the chain whose heaviest is as light as possible.

    Raises:
        ValueError: the model has no chain, fewer pieces than stages, or too few that have parameters.
    """
    names, weights = pieces(model), blueprint_of(model).weights
    if not names:
        raise ValueError(
            f"a pipeline needs a chain: {type(model).__name__} is no nn.Sequential and declares no blueprint.chain"
        )
    if len(names) < num_stages:
        raise ValueError(f"{len(names)} layers ({', '.join(names)}) cannot fill {num_stages} stages of a pipeline")
    have = {name: any(True for _ in model.get_submodule(name).parameters()) for name in names}
    costs = [weights.get(name, weights.get(name.rpartition(".")[0], 1.0 if have[name] else LIGHT)) for name in names]
    bounds = [0, *balanced(costs, num_stages), len(names)]
    stages = [names[start:end] for start, end in pairwise(bounds)]
    if bare := [stage for stage in stages if not any(have[name] for name in stage)]:
        raise ValueError(
            f"{sum(have.values())} layers with parameters cannot fill {num_stages} stages of a pipeline: "
            f"{', '.join(bare[0])} would be one without any"
        )
    return stages


def balanced(costs: Sequence[float], num_stages: int) -> list[int]:
    """Where to cut a row of costs into runs, none empty, so that the costliest run costs least; the cuts, ascending.

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


def stage(model: nn.Module, keep: Sequence[str]) -> nn.Module:
    """A copy of the model in which every other piece of its chain does nothing."""
    others: dict[int, object] = {
        id(model.get_submodule(name)): nn.Identity() for name in pieces(model) if name not in keep
    }
    return copy.deepcopy(model, others)  # what is not kept is not copied either


def replace(model: nn.Module, name: str, module: nn.Module) -> None:
    """Put another module in the place of the one that has this name."""
    parent, _, attribute = name.rpartition(".")
    _put(model.get_submodule(parent), attribute, module)


def _put(parent: nn.Module, attribute: str, module: nn.Module) -> None:
    if isinstance(parent, nn.ModuleDict):
        parent[attribute] = module
    elif isinstance(parent, nn.ModuleList | nn.Sequential):
        parent[int(attribute)] = module
    else:
        setattr(parent, attribute, module)
