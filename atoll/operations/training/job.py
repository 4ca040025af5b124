"""A centralized training as its request names it: all mistakes are reported before anything starts."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from typing import Any, TypeVar

import torch

from atoll.exports.tools import parsed
from atoll.ground.faults import faults_in
from atoll.ground.printable import count_of
from atoll.operations.faults import CommandError
from atoll.operations.load import load_user_task, missing_file, overriding
from atoll.operations.reporter import note
from atoll.operations.requests import TrainRequest
from atoll.operations.starts import with_start_file
from atoll.operations.task_failures import failure_of_the_task
from atoll.operations.training.folder import LOCK
from atoll.operations.training.privacy import terms_of
from atoll.parallel.engine.plan import AUTO, Plan, given_plan, possible_plans
from atoll.parallel.trainer.config import TrainConfig
from atoll.parallel.trainer.job import Job, JobRefused, check_job
from atoll.parallel.world import ranks_here, read_world
from atoll.task.array_task import ArrayTask
from atoll.task.local import Local
from atoll.task.task import Task, task_name
from atoll.training.model.parameters import model_on_meta
from atoll.training.private.config import PrivacyConfig

SECTIONS = ("local", "train", "plan", "privacy", "task", "sites")
"""The first parts of the keys that --set takes."""

Settings = TypeVar("Settings")


def ready(request: TrainRequest, task: Task | ArrayTask | None = None) -> tuple[TrainRequest, Job]:
    """Return the job of a request, and the request as ranks take it; errors as in `job_of` and `check_place`.

    Args:
        request: the request.
        task: the task that it names; None: it is loaded.
    """
    request = with_settings(request)
    check_place(request)
    parsed(request.exports)
    job = job_of(request, task)
    if request.mesh == AUTO:  # for the ranks, which then need not choose
        request = replace(request, mesh=job.plan.mesh.text, zero=job.plan.zero)
    return request, job


def with_settings(request: TrainRequest) -> TrainRequest:
    """Return the request with its short options among the overrides, and a start from a run as a file."""
    overrides = overriding(
        with_start_file(request.overrides),
        train__epochs=request.epochs,
        train__steps=request.steps,
        plan__zero=request.zero,
    )
    return replace(request, overrides=overrides, epochs=None, steps=None)


def job_of(request: TrainRequest, task: Task | ArrayTask | None = None) -> Job:
    """Make the job of a request, and check it as far as possible without loading the data.

    Args:
        request: the options.
        task: the task that they name; None: it is loaded.

    Raises:
        CommandError: all mistakes.
    """
    if task is None:
        if fault := missing_file(request.task):
            raise CommandError(fault)
        task = load_user_task(request.task)
    if not isinstance(task, Task):
        raise CommandError(
            f"{request.task} is an ArrayTask, which trains with its own code; `atoll train` takes a Task"
        )
    faults: list[str] = []
    given = _by_section(request.overrides, faults)
    config = _changed(TrainConfig.with_overrides, TrainConfig(), given["train"], faults)
    local = _changed(Local.with_overrides, task.local, given["local"], faults)
    privacy = _changed(PrivacyConfig.with_overrides, PrivacyConfig(), given["privacy"], faults)
    task = _changed(Task.with_options, task, given["task"], faults)
    task = _changed(Task.with_site_settings, task, _by_site(given["sites"]), faults)
    plans = _plans(request, given["plan"], faults)
    if not faults:
        try:
            task = replace(task, local=local)
            job = Job(name=task_name(request.task), task=task, config=config, plan=plans[0], private=None)
            job = _job_with(plans, request, replace(job, private=terms_of(privacy, config, local)))
            check_job(job, world_size(request))
            return job
        except JobRefused as error:
            faults += faults_in(error)
        except CommandError as error:
            faults += error.faults
        except Exception as error:  # any: the user's code builds the model
            if (line := failure_of_the_task(error)) is None:
                raise
            faults.append(line)
    raise CommandError(*faults)


def world_size(request: TrainRequest) -> int:
    """Return the number of ranks: to start here, or started by the launcher that has started this process."""
    return request.nproc or read_world().size


def check_place(request: TrainRequest) -> None:
    """Check that the ranks can start here: their number, the device, and an empty folder with --fresh.

    Raises:
        CommandError: all mistakes.
    """
    faults = []
    if request.nproc is not None and request.nproc < 1:
        faults.append(f"--nproc: must be at least 1, got {request.nproc}")
    if request.nproc is not None and read_world().size > 1:
        faults.append(f"--nproc: a launcher has started {read_world().size} ranks already; leave it out")
    if request.device not in ("auto", "cpu", "cuda"):
        faults.append(f"--device: must be auto, cpu or cuda, got {request.device!r}")
    elif device_of(request) == "cuda" and torch.cuda.device_count() < (request.nproc or 1):
        num_ranks = request.nproc or 1
        faults.append(
            f"--device: {count_of(num_ranks, 'rank needs', 'ranks need')} as many GPUs, and this machine has "
            f"{torch.cuda.device_count()}; allowed: fewer ranks, or --device cpu"
        )
    if request.mesh == AUTO and request.nproc is None and (here := ranks_here()) != (size := read_world().size):
        known = f"has {here} of {size}" if here else f"has an unknown number of {size}: set LOCAL_WORLD_SIZE"
        faults.append(
            f"--mesh: auto chooses for the ranks of one machine, and this one {known}; allowed: a named mesh "
            "(`atoll plan` shows good ones)"
        )
    if request.fresh and request.folder.exists() and any(path.name != LOCK for path in request.folder.iterdir()):
        faults.append(f"--fresh: {request.folder} is not empty; delete it, or choose another folder with --out")
    if faults:
        raise CommandError(*faults)


def device_of(request: TrainRequest) -> str:
    """Return the kind of device, cpu or cuda; `auto` is cuda where there is a GPU."""
    if request.device != "auto":
        return request.device
    return "cuda" if torch.cuda.is_available() else "cpu"


def _by_section(overrides: Sequence[str], faults: list[str]) -> Mapping[str, dict[str, Any]]:
    """Return the overrides by section; append a fault for each override of no section."""
    found: dict[str, dict[str, Any]] = {section: {} for section in SECTIONS}
    for override in overrides:
        name, equals, value = override.partition("=")
        section, _, key = name.strip().partition(".")
        if not equals or not key:
            faults.append(f"--set: got {override!r}; allowed: key=value, with a key such as train.epochs")
        elif section not in found:
            faults.append(f"--set: {name.strip()}: unknown key (known: {', '.join(f'{s}.*' for s in SECTIONS)})")
        else:
            found[section][key] = value.strip()
    return found


def _changed(
    change: Callable[[Settings, Mapping[str, Any]], Settings],
    settings: Settings,
    given: Mapping[str, Any],
    faults: list[str],
) -> Settings:
    """Return changed settings; on faults append them to `faults`, and return the unchanged settings."""
    try:
        return change(settings, given)
    except ValueError as error:
        faults += faults_in(error)
    return settings


def _by_site(given: Mapping[str, Any]) -> dict[str, dict[str, Any]]:
    """Return the settings of sites, whose keys are NAME.SETTING, by the name of the site."""
    found: dict[str, dict[str, Any]] = {}
    for key, value in given.items():
        site, _, setting = key.rpartition(".")
        found.setdefault(site, {})[setting] = value
    return found


def _plans(request: TrainRequest, given: Mapping[str, Any], faults: list[str]) -> Sequence[Plan]:
    """Return the parallel plan; with "auto" all plans that may be chosen; none if the request has mistakes.

    `dp` is dp_replicate (DDP), or dp_shard with ZeRO.
    """
    settings = {**given, **({} if request.zero is None else {"zero": request.zero})}
    try:
        if request.mesh == AUTO:
            return possible_plans(world_size(request), settings)
        return [given_plan(request.mesh or f"dp={world_size(request)}", settings)]
    except ValueError as error:
        faults += faults_in(error)
    return []


def _job_with(plans: Sequence[Plan], request: TrainRequest, job: Job) -> Job:
    """Return the job with its plan; with "auto" the planner's choice, made on rank 0.

    Raises:
        JobRefused: no plan can train the task on these ranks; the message lists every reason.
    """
    if request.mesh != AUTO:
        return job
    from atoll.parallel.planner.choice import choose
    from atoll.parallel.planner.rank_memory import machine_of

    def faults_of(plan: Plan) -> list[str]:
        try:
            check_job(replace(job, plan=plan), world_size(request))
        except JobRefused as error:
            return list(faults_in(error))
        return []

    try:
        machine = machine_of(device_of(request), world_size(request))
        choice = choose(model_on_meta(job.task), plans, machine, optimizer=_optimizer(job), faults_of=faults_of)
    except ValueError as error:
        raise JobRefused(*faults_in(error)) from error
    if read_world().is_first:
        note(f"mesh auto is {choice.why}")
    return replace(job, plan=choice.plan)


def _optimizer(job: Job) -> str:
    """Return the planner's name of the training's optimizer; LARS and LARC keep as much as momentum."""
    from atoll.parallel.planner.candidate import MOMENTS

    local, name = job.task.local, job.config.optimizer or job.task.local.optimizer_name
    if name == "sgd" and local.momentum and job.config.optimizer is None:
        return "momentum"
    return name if name in MOMENTS else "momentum"
