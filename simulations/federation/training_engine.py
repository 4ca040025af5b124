"""The engine that a run's settings ask for."""

from atoll.parallel.array_task import ArrayTask
from atoll.parallel.errors import TaskBroken
from atoll.parallel.task import Task
from atoll.protocol.settings import ConfigError
from atoll.server.config import RunConfig
from atoll.simulations.engines.engine import Engine, Training
from atoll.simulations.engines.one_process import Batched, Sequential
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
    if simulation.engine == "batched":
        return Batched(training, threads=simulation.threads)
    if simulation.engine not in ("auto", "sequential"):
        raise ConfigError([f"simulation.engine: got {simulation.engine!r}; allowed: auto, batched, sequential"])
    return Sequential(training, threads=simulation.threads)
