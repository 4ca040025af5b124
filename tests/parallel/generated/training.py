"""The training of a case by Atoll on this rank, and by the plain loop."""

import logging
import time
from functools import partial
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from safetensors.numpy import load_file
from torch import nn
from torch.utils.data import TensorDataset

from atoll import Local, Task
from atoll.operations.training.process import REFUSED
from atoll.parallel.engine.mesh import Mesh
from atoll.parallel.engine.plan import Plan
from atoll.parallel.trainer.config import TrainConfig
from atoll.parallel.trainer.job import Job
from atoll.parallel.trainer.logs import Event
from atoll.parallel.trainer.run import Surroundings, train
from atoll.parallel.world import World, process_group, read_world
from tests.parallel.generated import plain
from tests.parallel.generated.answer import Answer
from tests.parallel.generated.models import CLASSES, DTYPES, FEATURES, LENGTH, WORDS, Description, build
from tests.parallel.generated.strategies import AXES, Case

EVER = 10**6


def data_of(case: Case) -> tuple[torch.Tensor, torch.Tensor]:
    """Return inputs and targets."""
    generator = torch.Generator().manual_seed(case.model.seed)
    rows = case.training.rows
    if case.model.entry == "features":
        inputs = torch.randn(rows, LENGTH, FEATURES, generator=generator, dtype=torch.float64)
        inputs = inputs.to(DTYPES[case.model.dtype])
    else:
        inputs = torch.randint(0, WORDS, (rows, LENGTH), generator=generator)
    classes = WORDS if case.model.sharing == "head" else CLASSES
    targets = torch.randint(0, classes, (rows,), generator=generator)
    if case.training.loss == "ignored":
        targets[1::3] = -100
    return inputs, targets


def local_of(case: Case) -> Local:
    """Return the settings of the optimizer that `plain.optimizer_of` makes."""
    kinds: dict[str, dict[str, Any]] = {
        "sgd": {"optimizer": "sgd", "lr": 0.1},
        "momentum": {"optimizer": "sgd", "lr": 0.1, "momentum": 0.9, "weight_decay": 0.01},
        "adam": {"optimizer": "adam", "lr": 0.01},
        "adamw": {"optimizer": "adamw", "lr": 0.01, "weight_decay": 0.1},
    }
    kind = kinds[case.training.optimizer]
    return Local(
        batch_size=case.training.batch,
        shuffle=False,
        clip_norm=case.training.clip,
        decay_vectors=case.training.decays_vectors,
        **kind,
    )


def loss_of(outputs: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
    """Return the mean cross entropy over the targets that count."""
    return nn.functional.cross_entropy(outputs, targets)


def model_of(described: Description) -> nn.Module:
    """Return the model of a description, by a name of its own for messages."""
    return build(described)


def plan_of(case: Case) -> Plan:
    """Return the plan."""
    settings = dict(case.plan)
    mesh = Mesh(**{axis: settings.pop(axis) for axis in AXES if axis in settings})
    return Plan(mesh=mesh, **settings)


def ends_of(case: Case) -> list[int]:
    """Return the last steps of the trainings in one folder, of which each resumes the one before."""
    steps = -(-case.training.rows // case.training.batch)
    return [steps] if case.training.stop is None else [case.training.stop, steps]


def config_of(case: Case, steps: int) -> TrainConfig:
    """Return the settings of a training to a step."""
    return TrainConfig(
        batch_size=case.training.batch,
        steps=steps,
        log_every=1,
        eval_every=EVER,
        checkpoint_every=EVER,
        asynchronous=False,
    )


def train_case(case: Case, folder: Path) -> Answer:
    """Train a case as this rank."""
    rank = read_world().rank
    logging.disable(logging.WARNING)
    inputs, targets = data_of(case)
    task = Task(
        model=partial(model_of, case.model),
        data=lambda _site, _part: TensorDataset(inputs, targets),
        loss=loss_of,
        sites=["a"],
        local=local_of(case),
        travels=case.training.travels,
    )
    jobs = [Job(name="generated", task=task, config=config_of(case, end), plan=plan_of(case)) for end in ends_of(case)]
    events: list[Event] = []
    world = World(rank, rank, case.ranks)
    folder.mkdir(parents=True, exist_ok=True)
    here = Surroundings(
        world=world,
        device="cpu",
        folder=folder,
        clock=time.monotonic,
        is_told_to_stop=lambda: False,
        report=events.append,
    )
    try:
        if case.ranks == 1 and not jobs[0].plan.is_sharded:
            for job in jobs:
                train(job, here)
        else:
            store = dist.FileStore(str(folder / "store"), case.ranks)  # type: ignore[attr-defined]
            with process_group(world, "cpu", store=store):
                for job in jobs:
                    train(job, here)
                    dist.barrier()
    except REFUSED as error:
        word = "failed" if any(event["event"] == "step" for event in events) else "refused"
        return Answer(word, f"{type(error).__name__}: {error}")
    losses = tuple(event["loss"] for event in events if event["event"] == "step")
    return Answer("done", "", losses, load_file(folder / "model.safetensors") if rank == 0 else None)


def expected_of(case: Case) -> plain.Trace:
    """Train a case by the plain loop: over whole batches, unless the passes matter."""
    ranks, micro_batches = (case.dp, case.plan.get("accumulate", 1)) if case.depends_on_passes else (1, 1)
    return plain.train(
        partial(build, case.model),
        data_of(case),
        loss_of,
        case.training,
        ranks=ranks,
        micro_batches=micro_batches,
    )
