"""What the command line asks for, as a job; every mistake in it is said at once, before anything is started."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch

from atoll.cli.faults import CommandError
from atoll.cli.files import load_user_task, missing_file
from atoll.parallel.engine.mesh import parse_mesh
from atoll.parallel.engine.plan import Plan
from atoll.parallel.task.overrides import overridden
from atoll.parallel.task.task import Task, task_name
from atoll.parallel.trainer.config import TrainConfig
from atoll.parallel.trainer.job import Job, JobRefused, check_job
from atoll.parallel.world import read_world

SECTIONS = ("local", "train", "plan")


@dataclass(frozen=True, slots=True, kw_only=True)
class Request:
    """The options of `atoll train`, as they were given."""

    task: str
    nproc: int | None
    mesh: str | None
    zero: int | None
    out: Path | None
    device: str
    overrides: Sequence[str]
    is_fresh: bool

    @property
    def folder(self) -> Path:
        """Where the training lies."""
        return self.out or Path(f"atoll-train-{task_name(self.task).removesuffix(':task').replace(':', '-')}")

    @property
    def for_a_rank(self) -> list[str]:
        """The same as the command line of one of its ranks."""
        options = {"--mesh": self.mesh, "--zero": self.zero, "--out": self.folder, "--device": self.device}
        given = [f"{name}={value}" for name, value in options.items() if value is not None]
        return [self.task, *given, *(f"--set={override}" for override in self.overrides)]


def job_of(request: Request) -> Job:
    """The job, checked as far as it can be without the data.

    Raises:
        CommandError: with everything that is wrong.
    """
    if fault := missing_file(request.task):
        raise CommandError(fault)
    task = load_user_task(request.task)
    if not isinstance(task, Task):
        raise CommandError(f"{request.task} is no PyTorch task: it trains from arrays to arrays, with code of its own")
    faults: list[str] = []
    given = _by_section(request.overrides, faults)
    config, local = TrainConfig(), task.local
    try:
        config = config.with_overrides(given["train"])
    except ValueError as error:
        faults += str(error).split("; ")
    try:
        local = local.with_overrides(given["local"])
    except ValueError as error:
        faults += str(error).split("; ")
    plan = _plan(request, given["plan"], faults)
    if not faults and plan is not None:
        job = Job(name=task_name(request.task), task=replace(task, local=local), config=config, plan=plan)
        try:
            check_job(job, world_size(request))
            return job
        except JobRefused as error:
            faults += str(error).split("; ")
    raise CommandError(*faults)


def world_size(request: Request) -> int:
    """Ranks that there will be: those of the launcher that has started us, or those that we are to start."""
    return request.nproc or read_world().size


def check_place(request: Request) -> None:
    """Insist that the ranks can be started here, and that the folder is what it is said to be.

    Raises:
        CommandError: with everything that is wrong.
    """
    faults = []
    if request.nproc is not None and request.nproc < 1:
        faults.append(f"--nproc: must be at least 1, got {request.nproc}")
    if request.nproc is not None and read_world().size > 1:
        faults.append(f"--nproc: a launcher has started {read_world().size} ranks already; leave it out")
    if request.device not in ("auto", "cpu", "cuda"):
        faults.append(f"--device: must be auto, cpu or cuda, got {request.device!r}")
    elif device_of(request) == "cuda" and torch.cuda.device_count() < (request.nproc or 1):
        faults.append(f"--device: {request.nproc or 1} ranks need as many GPUs, there are {torch.cuda.device_count()}")
    if request.is_fresh and request.folder.exists() and any(request.folder.iterdir()):
        faults.append(f"--fresh: {request.folder} is not empty; delete it, or choose another folder with --out")
    if faults:
        raise CommandError(*faults)


def device_of(request: Request) -> str:
    """cpu or cuda."""
    if request.device != "auto":
        return request.device
    return "cuda" if torch.cuda.is_available() else "cpu"


def _by_section(overrides: Sequence[str], faults: list[str]) -> Mapping[str, dict[str, Any]]:
    found: dict[str, dict[str, Any]] = {section: {} for section in SECTIONS}
    for override in overrides:
        name, is_there, value = override.partition("=")
        section, _, key = name.strip().partition(".")
        if not is_there or not key:
            faults.append(f"--set: got {override!r}; allowed: key=value, with a key such as train.epochs")
        elif section not in found:
            faults.append(f"--set: {name.strip()}: unknown key (known: {', '.join(f'{s}.*' for s in SECTIONS)})")
        else:
            found[section][key] = value.strip()
    return found


def _plan(request: Request, given: Mapping[str, Any], faults: list[str]) -> Plan | None:
    """The plan; `dp` stands for whole copies (DDP), unless ZeRO shares them out."""
    zero = {} if request.zero is None else {"zero": request.zero}
    settings = {**given, **zero}
    are_copies = str(settings.get("zero", "none")) in ("none", "0")
    try:
        mesh = parse_mesh(request.mesh or f"dp={world_size(request)}", replicate=are_copies)
        return overridden(Plan(mesh=mesh), "plan", settings, hidden=("mesh",))
    except ValueError as error:
        faults += str(error).split("; ")
    return None
