"""The plan of `mesh = "auto"`: the first, in the planner's order, that a task's model admits and a rank has room for.

    need    parameters + gradients + optimizer + transient of the rank with most [bytes] (`memory`)
    room    memory of a rank / 2; the other half is for activations, which are unknown of a custom model

The order is `search`'s where no speed is predicted: the narrowest tp, whose activations are waited for, and never
across machines; then the least traffic of ZeRO's stage (`accounting.TRAFFIC`); then the fewest moving parts. So copies
come first if they fit (DDP), then shards (ZeRO-1 to 3), then tensor parallelism. A pipeline is not chosen: its stages
would have to be balanced by the times of this model. If no plan has room, the one with the least need is taken, as long
as it is less than the memory.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from math import prod

from torch import nn
from torch.distributed.tensor.parallel import ColwiseParallel, ParallelStyle, RowwiseParallel

from atoll.ground.printable import count_of, printable_size
from atoll.parallel.engine.blueprint import blocks, blueprint_of
from atoll.parallel.engine.plan import Plan
from atoll.parallel.engine.sharding import matching, separable
from atoll.parallel.planner.accounting import TRAFFIC
from atoll.parallel.planner.candidate import Candidate
from atoll.parallel.planner.memory import without_activations
from atoll.parallel.planner.rank_memory import Machine
from atoll.parallel.planner.search import complexity
from atoll.parallel.planner.shape import Weight
from atoll.parallel.planner.units import Share, joined, unit

ROOM = 0.5
"""The fraction of a rank's memory that a plan may fill without activations."""

FaultsOf = Callable[[Plan], Sequence[str]]
"""(plan) -> the reasons why the training cannot take it."""


@dataclass(frozen=True, slots=True)
class Choice:
    """A chosen plan."""

    plan: Plan
    why: str
    """The reason, for a person: the plan, its need, and why the ones before it were passed over."""


def choose(model: nn.Module, plans: Sequence[Plan], machine: Machine, *, optimizer: str, faults_of: FaultsOf) -> Choice:
    """Choose a plan; the same for the same arguments.

    Args:
        model: the task's, on meta, with `requires_grad` as in training.
        plans: the possible ones (`plan.possible_plans`), all of one number of ranks.
        machine: the ranks of one machine.
        optimizer: the training's, one of `candidate.MOMENTS`.
        faults_of: returns the reasons against a plan.

    Raises:
        ValueError: there is none; with every reason against the first one, or with the least need, or because none
            stays within a machine.
    """
    inside = [plan for plan in plans if machine.num_ranks % plan.mesh.tp == 0]
    ordered = sorted(inside, key=lambda plan: (plan.mesh.tp, TRAFFIC[plan.zero_stage], _complexity(plan)))
    needs = [need_of(model, plan, optimizer) for plan in ordered]
    room = ROOM * machine.memory
    fitting = [index for index, need in enumerate(needs) if need <= room]
    tight = sorted((index for index, need in enumerate(needs) if need > room), key=lambda index: needs[index])
    against: dict[int, Sequence[str]] = {}
    for index in [*fitting, *tight]:
        if needs[index] > machine.memory:
            continue
        against[index] = faults_of(ordered[index])
        if not against[index]:
            return Choice(ordered[index], _why(ordered, needs, index, machine, against))
    if against:
        raise ValueError("; ".join(against[min(against)]))
    if not ordered:
        narrowest = min(plan.mesh.tp for plan in plans)
        raise ValueError(
            f"mesh: with these settings every mesh of {count_of(plans[0].mesh.size, 'rank')} has tp >= {narrowest}, "
            f"and auto divides no layer over machines, each with {count_of(machine.num_ranks, 'rank')}; start a "
            f"multiple of {narrowest} ranks on each machine, or name the mesh"
        )
    least = needs[tight[0]]
    raise ValueError(
        f"mesh: none of {count_of(plans[0].mesh.size, 'rank')} fits: {ordered[tight[0]].mesh} needs "
        f"{printable_size(least)} on each rank without activations, and a rank has {printable_size(machine.memory)}; "
        "take more ranks, or a smaller model"
    )


def need_of(model: nn.Module, plan: Plan, optimizer: str) -> int:
    """Return the memory of the rank with most, without activations [bytes]."""
    memory = without_activations(share_of(model, plan), Candidate(plan=plan, optimizer=optimizer))
    trained = trained_fraction(model)
    return round(replace(memory, gradients=trained * memory.gradients, optimizer=trained * memory.optimizer).total)


def _complexity(plan: Plan) -> tuple[int, int, int]:
    return complexity(Candidate(plan=plan))


def _why(
    plans: Sequence[Plan], needs: Sequence[int], chosen: int, machine: Machine, against: dict[int, Sequence[str]]
) -> str:
    size, memory = printable_size(needs[chosen]), printable_size(machine.memory)
    share = "within half" if needs[chosen] <= ROOM * machine.memory else "more than half"
    why = f"{_named(plans[chosen])}: {size} on a rank without activations, {share} of its {memory}"
    if chosen == 0:
        return why
    reason = f"is refused: {against[0][0]}" if against.get(0) else f"would need {printable_size(needs[0])}"
    return f"{why}; {_named(plans[0])} {reason}"


def _named(plan: Plan) -> str:
    return f"{plan.mesh} with ZeRO {plan.zero_stage}" if plan.zero_stage else str(plan.mesh)


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
