"""From settings to a federation: its clients, their devices and data, and who trains them."""

from collections.abc import Mapping

from atoll.parallel.array_task import ArrayTask
from atoll.parallel.task import Task
from atoll.protocol.settings import ConfigError
from atoll.protocol.vocabulary import ClientId
from atoll.simulations.federation.config import SimulationFile
from atoll.simulations.federation.federation import Setting
from atoll.simulations.federation.training_engine import training_of
from atoll.simulations.populations.population import Population


def setting_of(file: SimulationFile, task: Task | ArrayTask) -> Setting:
    """Everything that the settings name is made, and tried, before the first round begins.

    Raises:
        ConfigError: a population that is impossible, a trace with holes, an attack without clients, a rule or a sampler
            that does not load; with everything that is wrong.
    """
    population = file.population.of(task, seed=file.seed) if isinstance(task, Task) else None
    task, num_examples = _populated(file, task, population)
    names = [str(name) for name in num_examples]
    adversary = file.attack.of(names, file.seed)
    if isinstance(task, Task):
        task = adversary.task(task)
    _check_cohort(file, len(names))
    return Setting(
        config=file.run,
        task=task,
        num_examples=num_examples,
        fleet=file.devices.of(names, seed=file.seed),
        training=training_of(file.simulation, task, file.run),
        simulation=file.simulation,
        sampler=file.cohort.build(),
        adversary=adversary,
        lease=file.coordinator.lease,
        who_holds_what=None if population is None else lambda: population.report().plain(),
    )


def _populated(
    file: SimulationFile, task: Task | ArrayTask, population: Population | None
) -> tuple[Task | ArrayTask, Mapping[ClientId, int]]:
    """The task with the clients as its sites, and how many examples each has."""
    if population is not None:
        sizes = population.train.sizes.tolist()
        return population.task, dict(zip(map(ClientId, population.task.sites), sizes, strict=True))
    if file.population.kind != "natural":
        raise ConfigError([f"population: kind {file.population.kind!r} deals a Task's data; an ArrayTask has its own"])
    count = getattr(task, "num_examples", None)
    sites = tuple(getattr(task, "sites", ()))
    if not sites:
        raise ConfigError([f"{file.task}: the task has no sites, and so no clients to simulate"])
    return task, {ClientId(site): int(count(site)) if count is not None else 1 for site in sites}


def _check_cohort(file: SimulationFile, num_clients: int) -> None:
    needed = file.round.cohort_size if not file.round.is_asynchronous else file.round.concurrency
    if needed > num_clients:
        name = "concurrency" if file.round.is_asynchronous else "cohort_size"
        raise ConfigError([f"round.{name}: got {needed}; allowed: at most {num_clients}, as many as there are clients"])
