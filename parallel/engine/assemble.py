"""From a model and a plan to an engine: cut, lay over the mesh, give it its optimizers."""

from collections.abc import Callable, Iterator

import torch
from torch import nn

from atoll.parallel.communication.hooks import HookState, register
from atoll.parallel.communication.outer import Outer, make_outer, parse_outer
from atoll.parallel.engine import recompute
from atoll.parallel.engine.batchnorm import convert
from atoll.parallel.engine.blueprint import blocks, blueprint_of, cut, pieces, stage
from atoll.parallel.engine.mesh import Axes
from atoll.parallel.engine.passes import Loss, Passes
from atoll.parallel.engine.pipeline import Pipeline, stages_of
from atoll.parallel.engine.plan import SPLIT, Plan
from atoll.parallel.engine.sharding import apply_data_parallel, apply_tensor_parallel, unmatched
from atoll.parallel.engine.step import Engine, Executor, trained
from atoll.parallel.engine.ties import Ties, tied_names

MakeOptimizer = Callable[[list[tuple[str, nn.Parameter]]], torch.optim.Optimizer]
"""Named parameters -> their optimizer."""


def check_model(model: nn.Module, plan: Plan, *, batch_size: int | None = None) -> None:
    """Insist that a model, and a global batch, can be cut as the plan has it: before any process group can hang.

    Args:
        model: the whole one, as the task builds it.
        plan: of the training.
        batch_size: examples of the global batch; None when not known.

    Raises:
        ValueError: with everything that does not fit, by its number.
    """
    blueprint, mesh = blueprint_of(model), plan.mesh
    faults: list[str] = []
    if not trained(model):
        faults.append(f"{type(model).__name__} has no parameter to train")
    if mesh.tp > 1 and blueprint.tensor is None:
        faults.append(f"tp={mesh.tp}: {type(model).__name__} declares no blueprint.tensor, so it cannot be cut")
    faults += [
        f"tp={mesh.tp} must divide {name}={number}" for name, number in blueprint.divisible.items() if number % mesh.tp
    ]
    if mesh.tp > 1 and blueprint.tensor is not None:
        styles = blueprint.tensor(plan.sequence_parallel, plan.loss_parallel)
        faults += [f"blueprint.tensor: no module is called {pattern}" for pattern in unmatched(model, styles)]
    if mesh.pp > 1:
        try:
            stages = cut(model, plan.num_stages)
        except ValueError as error:
            faults.append(f"pp={mesh.pp}: {error}")
        else:
            faults += _twice_in_a_stage(model, stages) if plan.schedule in SPLIT else []
    if batch_size is not None and batch_size < mesh.dp * plan.microbatches:
        faults.append(
            f"a global batch of {batch_size} is too small for dp={mesh.dp} ranks with {plan.microbatches} "
            f"micro-batches each: at least {mesh.dp * plan.microbatches}"
        )
    if faults:
        raise ValueError("; ".join(faults))


def _twice_in_a_stage(model: nn.Module, stages: list[list[str]]) -> Iterator[str]:
    """Torch cannot part the gradients of the inputs from those of a weight that both pass through twice."""
    for names in tied_names(model):
        for stage_names in stages:
            here = [name for name in names if name.startswith(tuple(f"{piece}." for piece in stage_names))]
            if len(here) > 1:
                yield f"{' and '.join(here)} are one weight: no schedule that parts its gradients ({', '.join(SPLIT)})"


def assemble(
    model: nn.Module,
    plan: Plan,
    *,
    loss: Loss,
    make_optimizer: MakeOptimizer,
    axes: Axes | None = None,
    device: torch.device | str = "cpu",
    lr: Callable[[int], float] | None = None,
    clip_norm: float | None = None,
    rows: int | None = None,
) -> Engine:
    """Build the engine of this rank.

    Args:
        model: the whole one, with the same values on every rank; it is taken over. On `meta` the parts stay there: the
            caller materializes them and loads their values.
        plan: how it is trained.
        loss: (outputs, targets) -> mean over the units of the batch.
        make_optimizer: called once for each part; it may leave parameters out, and must not have others.
        axes: the mesh on the ranks; may be None when the plan has one rank and wraps nothing.
        device: of this rank.
        lr: step (from 0) -> learning rate; None leaves it to the optimizer.
        clip_norm: largest L2 norm of the global gradient (> 0).
        rows: examples of this rank's largest batch, for a pipeline whose first batch may be a smaller one.

    Raises:
        ValueError: the model cannot be cut so, with every reason; or what else is given does not fit.
    """
    device = torch.device(device)
    check_model(model, plan)
    if clip_norm is not None and not clip_norm > 0:
        raise ValueError(f"clip_norm must be above 0, got {clip_norm}")
    if axes is None and (plan.mesh.size > 1 or plan.is_sharded):
        raise ValueError(f"a plan with {plan.mesh} and zero={plan.zero_stage} needs the axes of its mesh")
    is_meta = any(parameter.is_meta for parameter in model.parameters())
    if is_meta and plan.mesh.tp == 1 and not plan.is_sharded:
        raise ValueError(
            "a model on meta must be sharded or cut along tp: materializing a plain one makes other tensors"
        )
    parts, ties = _cut(model, plan, axes)
    if not is_meta and not plan.offload:
        parts = [part.to(device) for part in parts]
    parts = [_laid_out(part, plan, axes) for part in parts]
    separated = None if axes is None or not ties else Ties(ties[0], ties[1], parts, axes)
    optimizers = [_optimizer(part, make_optimizer) for part in parts]
    sequence = blueprint_of(model).sequence if plan.mesh.tp > 1 and plan.sequence_parallel else None
    executor: Executor
    if plan.mesh.pp > 1:
        assert axes is not None
        executor = Pipeline(parts, loss, plan, axes, device, rows)
    else:
        executor = Passes(parts[0], loss, plan, device)
    return Engine(
        parts=parts,
        optimizers=optimizers,
        executor=executor,
        plan=plan,
        axes=axes,
        device=device,
        lr=lr,
        clip_norm=clip_norm,
        sequence=sequence,
        ties=separated,
        outer=_outer(plan, axes),
        compression=_compression(parts[0], plan, axes),
    )


def _cut(
    model: nn.Module, plan: Plan, axes: Axes | None
) -> tuple[list[nn.Module], tuple[list[list[str]], dict[str, int]] | None]:
    """The stages of this rank, and the tied weights that the cut separates with the pp rank of each name."""
    if plan.mesh.pp == 1 or axes is None:
        return [model], None
    found = cut(model, plan.num_stages)
    rank_of = {index: rank for rank in range(plan.mesh.pp) for index in stages_of(rank, plan)}
    stage_of = {piece: index for index, names in enumerate(found) for piece in names}
    separated: list[list[str]] = []
    places: dict[str, int] = {}
    for names in tied_names(model):
        at = {name: stage_of[piece] for name in names for piece in pieces(model) if name.startswith(f"{piece}.")}
        if len(set(at.values())) > 1:
            separated.append(names)
            places |= {name: rank_of[index] for name, index in at.items()}
    parts = [stage(model, found[index]) for index in stages_of(axes.coordinates["pp"], plan)]
    return parts, (separated, places) if separated else None


def _laid_out(part: nn.Module, plan: Plan, axes: Axes | None) -> nn.Module:
    names = blocks(part)
    if plan.batchnorm != "local":
        convert(part, plan.batchnorm, None if axes is None or plan.synced_dp == 1 else axes.dp_group)
    if plan.mesh.tp > 1 and axes is not None:
        apply_tensor_parallel(part, axes.device_mesh["tp"], plan)
    for name in names:
        block = part.get_submodule(name)
        if plan.recompute != "none":
            recompute.recompute(block, plan.recompute)
        if plan.compile:
            block.compile()
    if axes is None:
        return part
    return apply_data_parallel(part, axes, plan, names)


def _optimizer(part: nn.Module, make_optimizer: MakeOptimizer) -> torch.optim.Optimizer:
    named = trained(part)
    optimizer = make_optimizer(named)
    given = {id(parameter) for _, parameter in named}
    foreign = [p.shape for group in optimizer.param_groups for p in group["params"] if id(p) not in given]
    if foreign:
        raise ValueError(
            f"make_optimizer must take the parameters that it is given; {len(foreign)} others are in its optimizer, "
            f"the first of shape {tuple(foreign[0])}"
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
