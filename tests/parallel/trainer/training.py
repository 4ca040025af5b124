"""Trains a task of the tests, in this process or on this rank of a group that is there."""

from collections.abc import Callable
from itertools import count
from pathlib import Path

from safetensors.torch import load_file
from torch import Tensor

from atoll import Task
from atoll.parallel.engine.mesh import Mesh
from atoll.parallel.engine.plan import Plan
from atoll.parallel.private.terms import Terms
from atoll.parallel.trainer.config import TrainConfig
from atoll.parallel.trainer.job import Job
from atoll.parallel.trainer.logs import Event, json_log
from atoll.parallel.trainer.run import Result, Surroundings, train
from atoll.parallel.world import read_world
from tests.parallel.trainer import tasks

CONFIG = TrainConfig(batch_size=8, log_every=1)


def run(
    folder: Path,
    *,
    task: Task = tasks.task,
    config: TrainConfig = CONFIG,
    plan: Plan | None = None,
    stop_after: int | None = None,
    stopping_rank: int = 0,
    device: str = "cpu",
    private: Terms | None = None,
) -> Result:
    """Train; after `stop_after` steps one rank is asked to stop. A step takes at least half a second of this clock."""
    world = read_world()
    steps = 0

    def is_told() -> bool:
        return world.rank == stopping_rank and stop_after is not None and steps >= stop_after

    def counting(event: Event) -> None:
        nonlocal steps
        if event["event"] == "step":
            steps = event["step"]
        if world.is_first:
            write(event)

    folder.mkdir(parents=True, exist_ok=True)
    write: Callable[[Event], None] = json_log(folder / "log.jsonl")
    here = Surroundings(
        world=world,
        device=device,
        folder=folder,
        clock=count(step=0.5).__next__,
        is_told_to_stop=is_told,
        report=counting,
    )
    return train(Job(name="tasks:task", task=task, config=config, plan=plan or Plan(), private=private), here)


def on_ranks(folder: Path, plan: Plan, stop_after: int | None = None, stopping_rank: int = 0) -> Result:
    return run(folder, plan=plan, stop_after=stop_after, stopping_rank=stopping_rank)


def mesh(**degrees: int) -> Plan:
    return Plan(mesh=Mesh(**degrees))


def model(folder: Path) -> dict[str, Tensor]:
    return load_file(folder / "model.safetensors")
