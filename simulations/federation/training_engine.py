"""The training engine of a run, by its settings."""

from collections.abc import Callable, Sequence

import torch

from atoll.ground.faults import faults_in
from atoll.protocol.settings import ConfigError
from atoll.server.config.run import RunConfig
from atoll.simulations.engines.choice import Resources, choose
from atoll.simulations.engines.determinism import check_deterministic, check_evaluation, check_model
from atoll.simulations.engines.engine import Engine, Training
from atoll.simulations.engines.processes.over_ray import RayMissing
from atoll.simulations.engines.processes.placement import faults_of
from atoll.simulations.engines.sequential import Sequential
from atoll.simulations.federation.config import SimulationConfig
from atoll.task.apps import AppTask, simulated_number
from atoll.task.array_task import ArrayTask
from atoll.task.arrays import Arrays
from atoll.task.errors import TaskBroken, TaskMismatch
from atoll.task.task import Task, task_name

Tell = Callable[[str], None]


def training_of(simulation: SimulationConfig, task: Task | ArrayTask, run: RunConfig) -> Training:
    """Return the settings of training that all clients have in common.

    Raises:
        ConfigError: the task does not allow these settings, or the device is missing.
    """
    if simulation.device == "cuda" and not torch.cuda.is_available():
        raise ConfigError(["simulation.device: got 'cuda'; allowed here: \"cpu\", because torch finds no CUDA device"])
    if faults := faults_of(simulation.devices, simulation.device, torch.cuda.device_count()):
        raise ConfigError(faults)
    try:
        return Training(
            task=task,
            overrides=run.given,
            algorithm=run.aggregation.training,
            device=simulation.device,
            model_seed=run.seed,
            run_number=simulated_number(task_name(run.task), run.given, run.seed),
        )
    except (TaskBroken, ValueError) as error:
        raise ConfigError(faults_in(error)) from error


def engine_of(
    simulation: SimulationConfig,
    training: Training,
    version: Arrays,
    clients: Sequence[str],
    *,
    cohort: int,
    trainings: int,
    before: str,
    tell: Tell,
) -> Engine:
    """Return an engine that is ready to train, after a check that the task is deterministic.

    Two models of one seed, and two trainings of one client, must be equal. A Flower app is neither checked nor
    measured: a training may have side effects, so its clients train as often as in Flower, in the sequential engine
    unless another one is named.

    Args:
        simulation: the settings that name the engine.
        training: the settings of all clients' training.
        version: the version of the model for the check.
        clients: the clients of the run.
        cohort: the number of clients of a round.
        trainings: the number of trainings that are left in the run.
        before: the kind of engine with which a resumed run began; "auto" keeps it, because another would round
            differently.
        tell: a callback for the measurements of "auto".

    Raises:
        ConfigError: the task is not deterministic, its model does not match the version, or the engine is missing.
    """
    is_app = isinstance(training.task, AppTask)
    name: str = simulation.engine
    if name == "auto":
        name = before or ("sequential" if is_app else name)
    if simulation.devices:
        torch.cuda.set_device(simulation.devices[0])  # for computations in this process
    try:
        if not is_app:
            check_model(training)
            check_deterministic(lambda: Sequential(training, threads=simulation.threads), version, clients)
        choice = choose(
            training,
            version,
            clients,
            name=name,
            resources=Resources(
                simulation.workers or None, simulation.threads, simulation.ray_address, tuple(simulation.devices)
            ),
            cohort=cohort,
            trainings=trainings,
        )
    except TaskMismatch as error:
        raise ConfigError([f"the task's model differs from the run's: {error}; choose another --out"]) from error
    except (TaskBroken, RayMissing) as error:
        raise ConfigError([str(error)]) from error
    if choice.figures or choice.reasons:
        tell(str(choice))
    return choice.engine


def check_evaluations(
    simulation: SimulationConfig, training: Training, version: Arrays, clients: Sequence[str]
) -> None:
    """Check that two evaluations of one client are equal, as all clients share a model; skip a Flower app.

    Raises:
        ConfigError: the two evaluations differ.
    """
    if isinstance(training.task, AppTask):
        return
    try:
        check_evaluation(Sequential(training, threads=simulation.threads), version, clients, training.model_seed)
    except TaskBroken as error:
        raise ConfigError([str(error)]) from error


def kind_of(engine: Engine) -> str:
    """Return the name of an engine's kind, by which the settings select it."""
    kinds = ("ray", "batched", "processes")
    return next((kind for kind in kinds if kind in engine.name.lower()), "sequential")
