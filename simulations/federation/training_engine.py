"""The engine that a run's settings ask for."""

from collections.abc import Callable, Sequence

import torch

from atoll.parallel.task.array_task import ArrayTask
from atoll.parallel.task.arrays import Arrays
from atoll.parallel.task.errors import TaskBroken, TaskMismatch
from atoll.parallel.task.task import Task
from atoll.protocol.settings import ConfigError
from atoll.server.config.run import RunConfig
from atoll.simulations.engines.choice import choose
from atoll.simulations.engines.determinism import check_deterministic, check_model
from atoll.simulations.engines.engine import Engine, Training
from atoll.simulations.engines.processes.over_ray import RayMissing
from atoll.simulations.engines.sequential import Sequential
from atoll.simulations.federation.config import SimulationConfig

Tell = Callable[[str], None]


def training_of(simulation: SimulationConfig, task: Task | ArrayTask, run: RunConfig) -> Training:
    """What all clients have in common.

    Raises:
        ConfigError: the task cannot be trained so, or there is no such device.
    """
    if simulation.device == "cuda" and not torch.cuda.is_available():
        raise ConfigError(["simulation.device: got 'cuda'; allowed here: \"cpu\", for torch finds no CUDA device"])
    try:
        return Training(
            task=task,
            overrides=dict(run.local),
            algorithm=run.aggregation.algorithm,
            device=simulation.device,
            model_seed=run.seed,
        )
    except (TaskBroken, ValueError) as error:
        raise ConfigError(str(error).split("; ")) from error


def engine_of(
    simulation: SimulationConfig,
    training: Training,
    version: Arrays,
    clients: Sequence[str],
    *,
    cohort: int,
    before: str,
    tell: Tell,
) -> Engine:
    """Ready to train, and tried: two models of one seed, and two trainings of one client, must be the same.

    Args:
        simulation: says which.
        training: of all clients.
        version: of the model, to try it with.
        clients: of the run.
        cohort: clients of a round.
        before: the engine's kind with which the run was begun: "auto" stays with it, for another would round otherwise.
        tell: is told what was measured.

    Raises:
        ConfigError: the task is not deterministic, its model is not the version's, or there is no such engine.
    """
    name = before if simulation.engine == "auto" and before else simulation.engine
    try:
        check_model(training)
        check_deterministic(lambda: Sequential(training, threads=simulation.threads), version, clients)
        choice = choose(
            training,
            version,
            clients,
            name=name,
            workers=simulation.workers or None,
            threads=simulation.threads,
            cohort=cohort,
            address=simulation.ray_address,
        )
    except TaskMismatch as error:
        raise ConfigError(
            [f"the task's model is another one than that of the run: {error}; choose another --out"]
        ) from error
    except (TaskBroken, RayMissing) as error:
        raise ConfigError([str(error)]) from error
    if choice.figures or choice.reasons:
        tell(str(choice))
    return choice.engine


def kind_of(engine: Engine) -> str:
    """By which name the same engine is had again."""
    kinds = ("ray", "batched", "processes")
    return next((kind for kind in kinds if kind in engine.name.lower()), "sequential")
