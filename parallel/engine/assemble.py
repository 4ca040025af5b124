"""The assembly of an engine from a model and a plan: cut into stages, sharded over the mesh, with its optimizers."""

from collections.abc import Collection, Iterator

import torch
from torch import nn

from atoll.ground.faults import Refused
from atoll.ground.printable import count_of
from atoll.parallel.communication.hooks import HookState, register
from atoll.parallel.communication.outer import Outer, make_outer
from atoll.parallel.communication.outer_config import parse_outer
from atoll.parallel.engine import batchnorm, recompute
from atoll.parallel.engine.admissible import fit, lazy_faults, tensor_faults
from atoll.parallel.engine.agreement import Agreement
from atoll.parallel.engine.attached import Attached
from atoll.parallel.engine.axes import Axes
from atoll.parallel.engine.blank import give_memory
from atoll.parallel.engine.blueprint import blocks, blueprint_of, cut, pieces, stage
from atoll.parallel.engine.optimization import MakeOptimizer, Optimization
from atoll.parallel.engine.passes import Loss, Passes, PipelineShape, WholeOutputs
from atoll.parallel.engine.plan import SPLIT, Plan, stages_of
from atoll.parallel.engine.sharding import apply_data_parallel, apply_tensor_parallel, nested, separable, unmatched
from atoll.parallel.engine.step import Engine, Executor, LocalModel, inner, trained
from atoll.parallel.engine.ties import Ties, tied_names
from atoll.parallel.huggingface.pipeline_trial import chain_faults, outputs_of


def check_model(model: nn.Module, plan: Plan, *, batch_size: int | None = None) -> None:
    """Check that a model, and a global batch, fit the plan: before any process group can hang.

    Args:
        model: the whole model, as the task builds it.
        plan: the plan of the training.
        batch_size: examples of the global batch; None if unknown.

    Raises:
        ValueError: it does not fit; the message lists every misfit with its number.
    """
    blueprint, mesh = blueprint_of(model), plan.mesh
    faults = list(lazy_faults(model)) or list(tensor_faults(model, plan, _groups(model) if plan.is_sharded else {}))
    faults += batchnorm.faults(model, plan.batchnorm)
    if not trained(model):
        faults.append(f"{type(model).__name__} has no parameter to train")
    faults += _faults_of_tensor_parallel(model, plan) if mesh.tp > 1 else []
    if mesh.pp > 1:
        try:
            stages = cut(model, plan.num_stages)
        except ValueError as error:
            faults.append(f"pp={mesh.pp}: {error}")
        else:
            faults += _twice_in_a_stage(model, stages) if plan.schedule in SPLIT else []
            if blueprint.is_planned:
                faults += [f"pp={mesh.pp}: {fault}" for fault in chain_faults(model, stages)]
    if batch_size is not None and batch_size < mesh.dp * plan.microbatches:
        faults.append(
            f"a global batch of {batch_size} is too small for dp={mesh.dp} with "
            f"{count_of(plan.microbatches, 'micro-batch', 'micro-batches')} each: "
            f"at least {mesh.dp * plan.microbatches}"
        )
    if faults:
        raise Refused(*faults)


def _faults_of_tensor_parallel(model: nn.Module, plan: Plan) -> Iterator[str]:
    blueprint, tp = blueprint_of(model), plan.mesh.tp
    if blueprint.tensor is None:
        yield (
            f"tp={tp}: {type(model).__name__} declares no blueprint.tensor, so it cannot be sharded; declare it, "
            "or use tp=1"
        )
    yield from (f"tp={tp}: {fault}" for fault in blueprint.tensor_faults)
    yield from (f"tp={tp} must divide {name}={number}" for name, number in blueprint.divisible.items() if number % tp)
    if blueprint.tensor is not None and not blueprint.tensor_faults:
        styles = blueprint.tensor(plan.sequence_parallel, plan.loss_parallel)
        yield from (f"blueprint.tensor: no module is called {pattern}" for pattern in unmatched(model, styles))
        if below := nested(model, styles):
            yield (
                f"tp={tp}: {', '.join(below)} cannot be sharded: torch shards the parameters of a layer itself, not "
                "those of modules in it (a parametrization); leave it out of blueprint.tensor, or use tp=1"
            )
    if recurrent := [name for name, module in model.named_modules() if isinstance(module, nn.RNNBase)]:
        yield (
            f"tp={tp}: {', '.join(recurrent)} cannot be replicated: torch's recurrent layers make their first state "
            "themselves, as a tensor of one rank; use tp=1"
        )


def _groups(model: nn.Module) -> dict[str, str]:
    """Return for each parameter the name of the block with which `fully_shard` gathers it; "": it is in no block."""
    names = separable(model, blocks(model))
    return {
        parameter: next((name for name in names if parameter.startswith(f"{name}.")), "")
        for parameter, _ in model.named_parameters()
    }


def _twice_in_a_stage(model: nn.Module, stages: list[list[str]]) -> Iterator[str]:
    """Yield the weights that pass through a stage twice: torch cannot split the gradients of its inputs from theirs."""
    for names in tied_names(model):
        for stage_names in stages:
            within = [name for name in names if name.startswith(tuple(f"{piece}." for piece in stage_names))]
            if len(within) > 1:
                yield f"{' and '.join(within)} are one weight, so schedule must be none of {', '.join(SPLIT)}"


def assemble(
    model: nn.Module,
    plan: Plan,
    optimization: Optimization,
    *,
    axes: Axes | None = None,
    device: torch.device | str = "cpu",
    rows: int | None = None,
    borrowed: Collection[str] = (),
) -> Engine:
    """Build the engine of this rank.

    Args:
        model: the whole model, with the same values on every rank; the engine takes it over. The parameters
            of a blank one (`blank`) stay on meta where they are sharded: the caller gives them memory, and values.
        plan: the parallelism of the training.
        optimization: its loss, optimizers, learning rate and clipping.
        axes: the mesh on the ranks; may be None if the plan has one rank and wraps nothing.
        device: the device of this rank.
        rows: examples of this rank's largest batch, for a pipeline whose first batch may be a smaller one.
        borrowed: names of blocks whose parameters are used outside of their calls, too (`borrowed_blocks`).

    Raises:
        ValueError: the model does not fit the plan (the message lists every reason), or the axes or optimizer do not.
    """
    device = torch.device(device)
    check_model(model, plan)
    shape = PipelineShape(rows, _whole_outputs(model, plan))
    is_meta = any(parameter.is_meta for parameter in model.parameters())
    _check_axes(plan, axes)
    attached, (tied, places) = Attached(model, plan), _separated(model, plan)
    parts = _stages(model, plan, axes)
    if is_meta and plan.mesh.tp == 1 and not plan.is_sharded:
        give_memory(parts, device)  # nothing cuts its tensors, and wrappers keep them
    elif not is_meta and not plan.offload:
        parts = [part.to(device) for part in parts]
    parts = [_wrapped(part, plan, axes, borrowed) for part in parts]
    attached.put_on([inner(part) for part in parts])
    agreements = _agreements(parts, plan, axes)
    local = LocalModel(
        parts=parts,
        ties=Ties(tied, places, parts, axes) if tied and axes is not None else None,
        optimizers=[_optimizer(part, optimization.make_optimizer) for part in parts],
        executor=_executor(parts, plan, optimization.loss, axes, device, agreements, shape),
        agreements=agreements,
        attached=attached,
        sequence=blueprint_of(model).sequence if plan.mesh.tp > 1 and plan.sequence_parallel else None,
    )
    return Engine(
        local,
        plan,
        optimization,
        axes=axes,
        device=device,
        outer=_outer(plan, axes),
        compression=_compression(parts[0], plan, axes),
    )


def begin_again(engine: Engine, optimization: Optimization) -> None:
    """Reset an engine for another training of its parts: new optimizers, step 0.

    Args:
        engine: without compression, whose residuals belong to one training.
        optimization: its optimizers, learning rate and clipping; the loss stays that of `assemble`.
    """
    optimizers = [_optimizer(part, optimization.make_optimizer) for part in engine.parts]
    engine.begin(optimizers, optimization, _outer(engine.plan, engine.axes))


def _check_axes(plan: Plan, axes: Axes | None) -> None:
    if axes is None and (plan.mesh.size > 1 or plan.is_sharded):
        raise ValueError(f"a plan with {plan.mesh} and zero={plan.zero_stage} needs the axes of its mesh")


def _stages(model: nn.Module, plan: Plan, axes: Axes | None) -> list[nn.Module]:
    """Return the stages of this rank; without a pipeline the model."""
    if plan.mesh.pp == 1 or axes is None:
        return [model]
    names = cut(model, plan.num_stages)
    parts: list[nn.Module] = []
    taken: set[nn.Parameter] = set()
    for index in stages_of(axes.coordinates["pp"], plan):
        parts.append(stage(model, names[index], taken))
        taken |= set(parts[-1].parameters())
    return parts


def _whole_outputs(model: nn.Module, plan: Plan) -> WholeOutputs | None:
    """Return the function from the last stage's tensor to a Hugging Face model's outputs; None: another model."""
    if plan.mesh.pp == 1 or not blueprint_of(model).is_planned:
        return None
    return outputs_of(model, pieces(model))


def _separated(model: nn.Module, plan: Plan) -> tuple[list[list[str]], dict[str, int]]:
    """Return the tied weights whose names lie on different stages, and the rank on pp that has each name."""
    if plan.mesh.pp == 1:
        return [], {}
    rank_of = {index: rank for rank in range(plan.mesh.pp) for index in stages_of(rank, plan)}
    stage_of = {piece: index for index, names in enumerate(cut(model, plan.num_stages)) for piece in names}
    separated: list[list[str]] = []
    pp_ranks: dict[str, int] = {}
    for names in tied_names(model):
        stages = {name: stage_of[piece] for name in names for piece in pieces(model) if name.startswith(f"{piece}.")}
        if len(set(stages.values())) > 1:
            separated.append(names)
            pp_ranks |= {name: rank_of[index] for name, index in stages.items()}
    return separated, pp_ranks


def _agreements(parts: list[nn.Module], plan: Plan, axes: Axes | None) -> list[Agreement]:
    return [Agreement(part, axes, plan) for part in parts] if plan.is_sharded and axes is not None else []


def _executor(
    parts: list[nn.Module],
    plan: Plan,
    loss: Loss,
    axes: Axes | None,
    device: torch.device,
    agreements: list[Agreement],
    shape: PipelineShape,
) -> Executor:
    if plan.mesh.pp > 1:
        from atoll.parallel.engine.pipeline import Pipeline  # imports the compiler of torch

        assert axes is not None
        return Pipeline(parts, loss, plan, axes, device, shape)
    return Passes(parts[0], loss, plan, device, *agreements)


def _wrapped(part: nn.Module, plan: Plan, axes: Axes | None, borrowed: Collection[str]) -> nn.Module:
    """Return a stage with all wrappers of the plan, in torch's order (`sharding`)."""
    names = blocks(part)
    fit(part, plan)
    if plan.batchnorm != "local" or plan.mesh.pp > 1:  # whose smaller batches are filled up
        batchnorm.convert(part, plan.batchnorm, None if axes is None or plan.synced_dp == 1 else axes.dp_group)
    if plan.mesh.tp > 1 and axes is not None:
        apply_tensor_parallel(part, axes.device_mesh["tp"], plan)
    for name in names:
        block = part.get_submodule(name)
        if plan.recompute != "none":
            recompute.recompute(block, plan.recompute, name=name, is_compiled=plan.compile)
        if plan.compile:
            block.compile()
    if axes is None:
        return part
    return apply_data_parallel(part, axes, plan, names, borrowed)


def _optimizer(part: nn.Module, make_optimizer: MakeOptimizer) -> torch.optim.Optimizer:
    named = trained(part)
    optimizer = make_optimizer(named)
    allowed = {id(parameter) for _, parameter in named}
    foreign = [p.shape for group in optimizer.param_groups for p in group["params"] if id(p) not in allowed]
    if foreign:
        raise ValueError(
            f"make_optimizer must use the parameters that it is called with; {len(foreign)} others are in its "
            f"optimizer, the first of shape {tuple(foreign[0])}"
        )
    return optimizer


def _outer(plan: Plan, axes: Axes | None) -> Outer | None:
    config = parse_outer(plan.outer)
    if config is None or axes is None:
        return None
    return make_outer(config, axes.group("dp_replicate"))


def _compression(part: nn.Module, plan: Plan, axes: Axes | None) -> HookState | None:
    if plan.compression == "none" or axes is None or not isinstance(part, nn.parallel.DistributedDataParallel):
        return None
    return register(part, plan.compression, axes.group("dp_replicate"))
