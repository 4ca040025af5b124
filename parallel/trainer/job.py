"""The job of a training, and the checks of it before any process group can hang."""

import os
from collections.abc import Iterator
from dataclasses import dataclass

from torch import nn

from atoll.ground.faults import Refused, faults_in
from atoll.ground.folders import no_file
from atoll.parallel.engine.assemble import check_model
from atoll.parallel.engine.plan import Plan
from atoll.parallel.private.terms import Terms, plan_faults
from atoll.parallel.trainer.config import TrainConfig
from atoll.parallel.trainer.recipe import batch_size_of
from atoll.task.base import TRAINED
from atoll.task.context import context_of
from atoll.task.errors import TaskBroken
from atoll.task.task import Task
from atoll.training.base.base_files import BaseRefused
from atoll.training.base.loading import Matched
from atoll.training.base.peft_models import adapter_faults
from atoll.training.data.units import SUM
from atoll.training.model.frozen import keep_frozen, match_base
from atoll.training.model.parameters import model_on_meta, travel_faults


class JobRefused(Refused):
    """The job cannot begin; the message has every reason, separated by semicolons."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Job:
    """A task, and how it is trained."""

    name: str
    """The name of the task, wherever its file lies (`task.task_name`)."""

    task: Task
    config: TrainConfig
    plan: Plan
    private: Terms | None = None
    """The terms of example-level privacy; None: the training is not private."""


def check_job(job: Job, world_size: int) -> None:
    """Check that this number of ranks can begin the job, as far as that is known without the data.

    Raises:
        JobRefused: they cannot; the message lists every reason.
    """
    task, config, plan = job.task, job.config, job.plan
    faults = []
    try:
        plan.mesh.check_world(world_size)
    except ValueError as error:
        faults.append(str(error))
    faults += _faults_of_inputs(task, config)
    if job.private is not None:
        faults += [*plan_faults(plan), *_faults_of_private(config)]
    if config.noise_every is not None and plan.mesh.pp > 1:
        faults.append(
            f"train.noise_every: a pipeline cannot measure it, got {config.noise_every} with pp={plan.mesh.pp}"
        )
    if config.noise_every is not None and task.units == SUM:
        faults.append(
            f'train.noise_every: only a mean has a noise scale, got {config.noise_every} with Task(units="sum")'
        )
    known = job.private is None and (config.batch_size is not None or task.local.batch_size is not None)
    batch = batch_size_of(task.local, config, 0, plan.mesh.dp) if known else None
    if plan.mesh.pp > 1 and config.eval_batch_size is not None and batch is not None and config.eval_batch_size > batch:
        faults.append(
            f"train.eval_batch_size: at most the batch of {batch} in a pipeline, got {config.eval_batch_size}"
        )
    try:
        model = model_on_meta(task)
        if not isinstance(model, nn.Module):
            raise ValueError(f"task.model() must return a torch.nn.Module, got {type(model).__name__}")
        faults += travel_faults(model) + adapter_faults(model)
        if task.travels == TRAINED:
            keep_frozen(model)
        base_of(job, model)
        check_model(model, plan, batch_size=batch)
    except ValueError as error:
        faults.append(str(error))
    if faults:
        raise JobRefused(*faults)


def _faults_of_inputs(task: Task, config: TrainConfig) -> Iterator[str]:
    """Yield a sentence for each thing that a training lacks: the built-in loop, data, the file that it starts from."""
    if task.fit is not None:
        yield "the task has its own loop (fit), which the trainer can neither distribute nor resume"
    if not task.sites:
        yield "the task names no sites, so there is no data to pool"
    if config.start is not None and not os.path.isfile(config.start):
        yield f"train.start: {no_file(config.start)}"
    if config.start is None and not config.strict:
        yield "train.strict: false without train.start has no effect: set train.start, or leave it out"


def _faults_of_private(config: TrainConfig) -> Iterator[str]:
    """Yield a sentence for each setting of batches that are no Poisson samples, or that tells of the rows."""
    on = 'with privacy.unit = "example"'
    if config.batch_size is not None:
        sample = "each example takes part in a step with privacy.sample_rate, and no batch has a fixed size"
        yield f"train.batch_size: got {config.batch_size}: {sample}, so leave it out"
    for name, needed in (
        *(("sampling", "global"), ("last", "uneven"), ("lr_rule", "none"), ("base_batch", None)),
        *(("noise_every", None), ("workers", 0)),
    ):
        if (found := getattr(config, name)) != needed:
            yield f"train.{name}: got {found!r}: allowed {on} is {'none' if needed is None else repr(needed)}"


def base_of(job: Job, model: nn.Module) -> Matched | None:
    """Return the files of the values of a job's model, which may be on meta; None: it has no base.

    Raises:
        JobRefused: they do not fit; the message lists all differences.
    """
    if job.task.base is None:
        return None
    try:
        return match_base(model, job.task.base, context_of(job.task, seed=job.config.seed))
    except (BaseRefused, TaskBroken) as error:
        raise JobRefused(*faults_in(error)) from error
