"""The job of a training, and the checks of it before any process group can hang."""

import os
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn

from atoll.parallel.adapters.base_files import BaseRefused
from atoll.parallel.adapters.loading import Matched
from atoll.parallel.adapters.peft_models import adapter_faults
from atoll.parallel.data.batch import map_tensors
from atoll.parallel.engine.assemble import check_model
from atoll.parallel.engine.blueprint import blocks, cut, stage
from atoll.parallel.engine.borrowed import borrowed_blocks
from atoll.parallel.engine.inplace import written_in_forward
from atoll.parallel.engine.plan import Plan
from atoll.parallel.local_training.batches import fetcher
from atoll.parallel.local_training.frozen import keep_frozen, match_base
from atoll.parallel.local_training.parameters import travel_faults
from atoll.parallel.local_training.units import SUM
from atoll.parallel.task.base import TRAINED
from atoll.parallel.task.context import context_of
from atoll.parallel.task.errors import TaskBroken
from atoll.parallel.task.randomness import seeded
from atoll.parallel.task.task import Task
from atoll.parallel.trainer.config import TrainConfig
from atoll.parallel.trainer.recipe import batch_size_of

SMALL = 10_000_000
"""Number of parameters up to which a model is built once more for a check, if its code does not run on `meta`."""


class JobRefused(ValueError):
    """The job cannot begin; the message has every reason, separated by semicolons."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Job:
    """A task, and how it is trained."""

    name: str
    """The name of the task, wherever its file lies (`task.task_name`)."""

    task: Task
    config: TrainConfig
    plan: Plan


def check_job(job: Job, world_size: int) -> None:
    """Check that this number of ranks can begin the job, as far as that is known without the data.

    Raises:
        JobRefused: with every misfit.
    """
    task, config, plan = job.task, job.config, job.plan
    faults = []
    try:
        plan.mesh.check_world(world_size)
    except ValueError as error:
        faults.append(str(error))
    faults += _faults_of_inputs(task, config)
    if config.noise_every is not None and plan.mesh.pp > 1:
        faults.append(
            f"train.noise_every: a pipeline cannot measure it, got {config.noise_every} with pp={plan.mesh.pp}"
        )
    if config.noise_every is not None and task.units == SUM:
        faults.append(
            f'train.noise_every: only a mean has a noise scale, got {config.noise_every} with Task(units="sum")'
        )
    known = config.batch_size is not None or task.local.batch_size is not None
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
        raise JobRefused("; ".join(faults))


def _faults_of_inputs(task: Task, config: TrainConfig) -> Iterator[str]:
    """Yield what a training lacks: a loop that is ours, data, the file that it starts from."""
    if task.fit is not None:
        yield "the task has its own loop (fit), which the trainer can neither distribute nor resume"
    if not task.sites:
        yield "the task names no sites, so there is no data to pool"
    if config.start is not None and not os.path.isfile(config.start):
        yield f"train.start: there is no file {config.start}"


def base_of(job: Job, model: nn.Module) -> Matched | None:
    """Return the files of the values of a job's model, which may be on meta; None: it has no base.

    Raises:
        JobRefused: they do not fit; with all differences.
    """
    if job.task.base is None:
        return None
    try:
        return match_base(model, job.task.base, context_of(job.task, seed=job.config.seed))
    except (BaseRefused, TaskBroken) as error:
        raise JobRefused(str(error)) from error


def check_forward(job: Job, data: Any) -> list[str]:
    """Look at a forward pass of a model that is thrown away, and return the blocks that are borrowed from.

    A borrowed block has a parameter that is used outside of its call. No pass may change a parameter where the change
    would be lost. The pass needs no memory where the model's code runs on `meta`; else a small model takes a real one,
    with the seed of the training. A pass that fails here is left to the first step, which reports its error.

    Args:
        job: of the training.
        data: the pooled training data, of which two examples are read.

    Raises:
        JobRefused: with the names of the parameters.
    """
    plan = job.plan
    if not plan.is_sharded and plan.mesh.pp == 1:
        return []
    model = model_on_meta(job.task)
    seen = _look(model, data)
    if seen is None and sum(parameter.numel() for parameter in model.parameters()) < SMALL:
        with seeded(job.config.seed):
            seen = _look(job.task.model(), data)
    names, borrowed = seen or ([], [])
    if plan.mesh.pp > 1:
        _check_chain(job, data, model)
    if names:
        where = f"{plan.mesh}" + (f" with zero={plan.zero_stage}" if plan.is_sharded else "")
        raise JobRefused(
            f"{', '.join(names)}: forward changes them in place, which {where} would lose or repeat; use a "
            "parametrization (torch.nn.utils.parametrize), or train on one process or with dp_replicate"
        )
    return borrowed


def _check_chain(job: Job, data: Any, model: nn.Module) -> None:
    """Check, on a small model, that the stages of the pipeline one after another compute what the model computes.

    Raises:
        JobRefused: `forward` does more than to call its chain.
    """
    if sum(parameter.numel() for parameter in model.parameters()) >= SMALL:
        return
    with seeded(job.config.seed), torch.no_grad():
        model = job.task.model().eval()
        stages = [stage(model, names) for names in cut(model, job.plan.num_stages)]
        try:
            hidden = fetcher(data)(torch.arange(min(2, len(data))))[0]
            outputs = model(hidden)
        except Exception:
            return
        try:
            for part in stages:
                hidden = part(hidden)
            torch.testing.assert_close(hidden, outputs, rtol=1e-4, atol=1e-5, equal_nan=True)
        except Exception as error:
            raise JobRefused(
                f"pp={job.plan.mesh.pp}: the stages one after another give other outputs than the model, so forward "
                "does more than to call its chain (a skip connection over it, a hook): use pp=1, or put it into a layer"
            ) from error


def _look(model: nn.Module, data: Any) -> tuple[list[str], list[str]] | None:
    """Return the parameters that a pass in training mode changes, and the borrowed blocks; None if the pass fails."""
    borrowed: list[str] = []
    try:
        device = next(model.parameters()).device
        rows = torch.arange(min(2, len(data)))
        inputs = map_tensors(lambda tensor: tensor.to(device), fetcher(data)(rows)[0])
        model.train()
        written = written_in_forward(
            model, lambda: borrowed.extend(borrowed_blocks(model, blocks(model), lambda: model(inputs)))
        )
        return written, borrowed
    except Exception:
        return None


def model_on_meta(task: Task) -> nn.Module:
    """Return the model without memory for its values; with memory, if its own code cannot build it otherwise."""
    try:
        with torch.device("meta"):
            return task.model()
    except (RuntimeError, NotImplementedError):
        return task.model()
