"""The reasons why a mesh cannot do the local training of a task, before anything runs."""

from collections.abc import Callable, Iterator

from torch import nn
from torch.nn.modules.batchnorm import _BatchNorm

from atoll.parallel.adapters.peft_models import adapter_faults
from atoll.parallel.crew.frozen import base_of
from atoll.parallel.engine.assemble import check_model
from atoll.parallel.engine.plan import Plan
from atoll.parallel.local_training.frozen import keep_frozen
from atoll.parallel.local_training.local_layers import names_that_stay
from atoll.parallel.local_training.parameters import travel_faults
from atoll.parallel.task.base import TRAINED
from atoll.parallel.task.errors import TaskBroken
from atoll.parallel.task.local import Local
from atoll.parallel.task.task import Task
from atoll.parallel.trainer.job import model_on_meta

RANKS_MAX = 1024
"""The largest number of ranks: each may send a part of the update (`protocol/part_manifest`)."""


def faults_of_mesh(task: Task, local: Local, algorithm: str, plan: Plan) -> list[str]:
    """Return everything that a mesh cannot take, one sentence each.

    Args:
        task: with the options of the run.
        local: the settings of a round.
        algorithm: of the run.
        plan: the parallelism of the site.
    """
    faults = [*_faults_of_task(task), *_faults_of_plan(local, algorithm, plan)]
    try:
        model = outline_of(task)
    except ValueError as error:
        return [*faults, str(error)]
    of_tensors = [*travel_faults(model), *adapter_faults(model)]
    checks: list[Callable[[], object]] = [
        lambda: None if of_tensors else names_that_stay(model, local.keep),
        lambda: base_of(task, model, 0),
        lambda: check_model(model, plan, batch_size=local.batch_size),
    ]
    faults += [*of_tensors, *_faults_of_norms(model, plan)]
    for check in checks:
        try:
            check()
        except ValueError as error:
            faults.append(str(error))
    return faults


def outline_of(task: Task) -> nn.Module:
    """Return the model of a task without memory, with the mark of its frozen tensors.

    Raises:
        TaskBroken: it is no module, or only trained tensors travel, and there are none.
    """
    model = model_on_meta(task)
    if not isinstance(model, nn.Module):
        raise TaskBroken(f"task.model() must return a torch.nn.Module, got {type(model).__name__}")
    if task.travels == TRAINED:
        keep_frozen(model)
    return model


def is_divided(plan: Plan) -> bool:
    """Return whether no rank has the whole model."""
    return plan.is_sharded or plan.mesh.tp > 1 or plan.mesh.pp > 1


def _faults_of_task(task: Task) -> Iterator[str]:
    if task.fit is not None:
        yield "task.fit: the task's own loop cannot be divided over ranks; leave it out, or train in one process"
    if task.algorithm is not None:
        yield (
            f"task.algorithm: the hooks of {type(task.algorithm).__name__} need whole tensors, and a rank has boxes of "
            "them; leave it out, or train in one process"
        )


def _faults_of_plan(local: Local, algorithm: str, plan: Plan) -> Iterator[str]:
    if plan.mesh.size > RANKS_MAX:
        yield f"mesh: an update has at most {RANKS_MAX} parts, got {plan.mesh.size} ranks"
    if local.has_own_optimizer and is_divided(plan):
        yield (
            f"local.optimizer: {local.optimizer_name} might need whole parameters, and {plan.mesh} with "
            f"zero={plan.zero_stage} divides them; allowed: sgd, adam, adamw, or a mesh of dp_replicate alone"
        )
    if plan.compression != "none":
        yield f"plan.compression: must be none in a federation, got {plan.compression!r}; use the run's codec"
    if plan.outer != "none" and (algorithm != "fedavg" or local.prox_mu or local.keep_optimizer):
        needs = f"local.prox_mu = {local.prox_mu:g}" if local.prox_mu else f"algorithm {algorithm!r}"
        needs = "local.keep_optimizer" if local.keep_optimizer else needs
        yield f"plan.outer: {needs} needs one model in each step, got {plan.outer!r}; allowed: none"


def _faults_of_norms(model: nn.Module, plan: Plan) -> Iterator[str]:
    if not plan.divides or not any(isinstance(module, _BatchNorm) for module in model.modules()):
        return
    if plan.microbatches > 1:
        yield (
            f"the model has batch norms, whose statistics must be those of the whole batch: {plan.microbatches} "
            "micro-batches divide it; allowed: 1, or a model without them"
        )
    elif plan.batchnorm != "sync":
        yield (
            "the model has batch norms, whose statistics must be those of the whole batch: plan.batchnorm must be "
            f"sync, got {plan.batchnorm!r}"
        )
