"""The reasons why a mesh cannot do the local training of a task, before anything runs."""

from collections.abc import Callable, Iterator

from torch import nn
from torch.nn.modules.batchnorm import _BatchNorm

from atoll.parallel.engine.assemble import check_model
from atoll.parallel.engine.plan import Plan
from atoll.parallel.mesh_client.frozen import base_of
from atoll.parallel.trials.hooks import WAY_OUT, HooksTrial
from atoll.task.algorithm import Algorithm
from atoll.task.base import TRAINED
from atoll.task.context import context_of
from atoll.task.errors import TaskBroken
from atoll.task.local import Local
from atoll.task.task import Task
from atoll.training.base.peft_models import adapter_faults
from atoll.training.local.local_layers import names_that_stay
from atoll.training.model.frozen import keep_frozen
from atoll.training.model.parameters import built_on_meta, travel_faults
from atoll.training.optimizers.custom_optimizer import custom_optimizer
from atoll.training.trials.elementwise import is_elementwise

RANKS_MAX = 1024
"""The largest number of ranks: each may send a part of the update (`protocol/part_manifest`)."""


def faults_of_mesh(task: Task, local: Local, algorithm: str, plan: Plan) -> list[str]:
    """Return the reasons why a mesh cannot do a task's local training, one sentence each.

    Args:
        task: the task, with the options of the run.
        local: the settings of a round.
        algorithm: the algorithm of the run.
        plan: the parallelism of the site.
    """
    faults = [*_faults_of_task(task), *_faults_of_plan(local, algorithm, plan)]
    with built_on_meta(task) as model:
        try:
            _check_outline(model, task)
        except ValueError as error:
            return [*faults, str(error)]
        return [*faults, *_faults_of_model(task, local, plan, model)]


def _faults_of_model(task: Task, local: Local, plan: Plan, model: nn.Module) -> list[str]:
    faults: list[str] = []
    if local.has_custom_optimizer and plan.is_divided:
        faults += _faults_of_identity(local, plan, model)
    of_tensors = [*travel_faults(model), *adapter_faults(model)]
    checks: list[Callable[[], object]] = [
        lambda: None if of_tensors else names_that_stay(model, local.keep),
        lambda: base_of(task, model, 0),
        lambda: check_model(model, plan, batch_size=local.batch_size),
    ]
    faults += [*of_tensors, *_faults_of_norms(model, plan), *_faults_of_hooks(task, local, plan, model)]
    for check in checks:
        try:
            check()
        except ValueError as error:
            faults.append(str(error))
    return faults


def outline_of(task: Task) -> nn.Module:
    """Return the model of a task without memory, with the mark of its frozen tensors.

    Raises:
        TaskBroken: it is no module, or only trained tensors are exchanged, and there are none.
    """
    with built_on_meta(task) as model:
        _check_outline(model, task)
    return model


def _check_outline(model: object, task: Task) -> None:
    if not isinstance(model, nn.Module):
        raise TaskBroken(f"task.model() must return a torch.nn.Module, got {type(model).__name__}")
    if task.travels == TRAINED:
        keep_frozen(model)


def _faults_of_task(task: Task) -> Iterator[str]:
    if task.fit is not None:
        yield "task.fit: the task's own loop cannot be divided over ranks; leave it out, or train in one process"


def _faults_of_hooks(task: Task, local: Local, plan: Plan, model: nn.Module) -> list[str]:
    """Return the reasons why a mesh cannot run the hooks of a custom algorithm."""
    if task.algorithm is None:
        return []
    named, faults = type(task.algorithm).__name__, []
    if type(task.algorithm).loss is not Algorithm.loss:
        faults.append(
            f"task.algorithm: {named}.loss needs whole batches, and a rank of a mesh has rows of them; {WAY_OUT}"
        )
    if plan.mesh.pp > 1:
        faults.append(
            f"task.algorithm: the hooks of {named} need all parameters, and {plan.mesh} divides the layers into "
            "stages; allowed: a mesh without pp"
        )
    if plan.outer != "none":
        faults.append(f"plan.outer: task.algorithm needs one model in each step, got {plan.outer!r}; allowed: none")
    return faults or HooksTrial(task, local, model, plan.mesh.size).faults(context_of(task))


def _faults_of_plan(local: Local, algorithm: str, plan: Plan) -> Iterator[str]:
    if plan.mesh.size > RANKS_MAX:
        yield f"mesh: an update has at most {RANKS_MAX} parts, got {plan.mesh.size} ranks"
    if local.has_custom_optimizer and plan.is_divided:
        yield from _faults_of_optimizer(local, plan)
    if plan.compression != "none":
        yield f"plan.compression: must be none in a federation, got {plan.compression!r}; use the run's codec"
    if plan.outer != "none" and (algorithm != "fedavg" or local.prox_mu or local.keep_optimizer):
        needs = f"local.prox_mu = {local.prox_mu:g}" if local.prox_mu else f"algorithm {algorithm!r}"
        needs = "local.keep_optimizer" if local.keep_optimizer else needs
        yield f"plan.outer: {needs} needs one model in each step, got {plan.outer!r}; allowed: none"


def _faults_of_optimizer(local: Local, plan: Plan) -> Iterator[str]:
    try:
        if is_elementwise(local):
            return
        yield (
            f"local.optimizer: {local.optimizer_name} steps a tensor in another way than its parts, and {plan.mesh} "
            f"with zero={plan.zero_stage} divides them; allowed: one that moves each element by itself, or a mesh of "
            "dp_replicate alone"
        )
    except TaskBroken as error:
        yield str(error)


def _faults_of_identity(local: Local, plan: Plan, model: nn.Module) -> Iterator[str]:
    """Yield a sentence if a custom optimizer gives copies of the parameters other groups than the parameters.

    It knows them by identity then, such as from a list that the task keeps, and a mesh has others in their places.
    """
    parameters = [parameter for parameter in model.parameters() if parameter.requires_grad]
    copies = [nn.Parameter(parameter.detach().clone()) for parameter in parameters]
    for copy, parameter in zip(copies, parameters, strict=True):
        vars(copy).update(vars(parameter))
    try:
        differ = _groups(local, parameters) != _groups(local, copies)
    except TaskBroken:  # it cannot be made of tensors without memory
        return
    if differ:
        yield (
            f"local.optimizer: {local.optimizer_name} gives other settings to copies of the parameters, so it knows "
            f"them by identity, and {plan.mesh} with zero={plan.zero_stage} puts others in their places: choose by "
            "shape or by an attribute of the parameter (parameter.decays = False), or use a mesh of dp_replicate alone"
        )


def _groups(local: Local, parameters: list[nn.Parameter]) -> list[tuple[list[int], str]]:
    """Return the parameters of each group of a custom optimizer, as numbers, and its settings."""
    number = {id(parameter): index for index, parameter in enumerate(parameters)}
    groups = custom_optimizer(local, parameters).param_groups
    return [
        ([number[id(parameter)] for parameter in group["params"]], repr({**group, "params": None})) for group in groups
    ]


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
