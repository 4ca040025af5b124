"""The engine that a run's settings ask for."""

from atoll.parallel.array_task import ArrayTask
from atoll.parallel.errors import TaskBroken
from atoll.parallel.task import Task
from atoll.protocol.settings import ConfigError
from atoll.server.config import RunConfig
from atoll.simulations.engines.engine import Engine, Training
from atoll.simulations.engines.processes import Processes
from atoll.simulations.engines.sequential import Sequential
from atoll.simulations.federation.config import SimulationConfig


def engine_of(simulation: SimulationConfig, task: Task | ArrayTask, run: RunConfig) -> Engine:
    """Ready to train.

    Raises:
        ConfigError: the task cannot be trained so.
    """
    try:
        training = Training(
            task=task,
            overrides=dict(run.local),
            algorithm=run.aggregation.algorithm,
            device=simulation.device,
            model_seed=run.seed,
        )
    except (TaskBroken, ValueError) as error:
        raise ConfigError(str(error).split("; ")) from error
    return _chosen(simulation, training)


def _chosen(simulation: SimulationConfig, training: Training) -> Engine:
    workers = simulation.workers or None
    match simulation.engine:
        case "batched":
            return Processes(training, workers=workers, batched=True, threads=simulation.threads)
        case "processes":
            return Processes(training, workers=workers, threads=simulation.threads)
        case "ray":
            raise ConfigError(["simulation.engine: got 'ray'; allowed: auto, sequential, processes, batched"])
        case _:
            return Sequential(training, threads=simulation.threads)
