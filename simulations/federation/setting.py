"""The setting of a federation, built from its settings: clients, devices, data, training, adversary."""

from collections.abc import Mapping, Sequence
from dataclasses import replace

from atoll.parallel.task.array_task import ArrayTask
from atoll.parallel.task.task import Task
from atoll.protocol.settings import ConfigError, or_faults
from atoll.protocol.vocabulary import ClientId
from atoll.simulations.attacks.adversary import Adversary
from atoll.simulations.attacks.build import adversary_of
from atoll.simulations.federation.config import SimulationFile
from atoll.simulations.federation.federation import Setting
from atoll.simulations.federation.training_engine import training_of
from atoll.simulations.populations.empty_clients import dropping, faults_of_sizes
from atoll.simulations.populations.population import Population, populate
from atoll.simulations.populations.report import report


def setting_of(file: SimulationFile, task: Task | ArrayTask) -> Setting:
    """Build and check all parts that the settings name, before the first round begins.

    Raises:
        ConfigError: all faults, such as an impossible population, an incomplete trace, an attack with more malicious
            clients than there are, a rule or a sampler that does not load.
    """
    faults: list[str] = []
    sampler = or_faults(file.cohort.build, faults)
    training = or_faults(lambda: training_of(file.simulation, task, file.run), faults)
    populated = or_faults(lambda: _populated(file, task), faults)
    if populated is None:
        raise ConfigError(faults)  # without clients the other parts cannot be checked
    populated_task, num_examples, population, notes = populated
    names = [str(name) for name in num_examples]
    attacked = or_faults(lambda: _attacked(file, populated_task, names), faults)
    fleet = or_faults(lambda: file.devices.of(names, seed=file.seed), faults)
    faults += _cohort_faults(file, len(names))
    if faults or sampler is None or training is None or attacked is None or fleet is None:
        raise ConfigError(faults)
    adversary, poisoned = attacked
    return Setting(
        config=file.run,
        task=poisoned,
        num_examples=num_examples,
        fleet=fleet,
        training=replace(training, task=poisoned),
        simulation=file.simulation,
        sampler=sampler,
        adversary=adversary,
        lease=file.coordinator.lease,
        population_report=None if population is None else lambda: report(population).plain(),
        notes=notes,
    )


def _populated(
    file: SimulationFile, task: Task | ArrayTask
) -> tuple[Task | ArrayTask, Mapping[ClientId, int], Population | None, tuple[str, ...]]:
    """Return the task with the clients as its sites, the number of examples of each, their population, and its notes.

    An `ArrayTask` reads its own data, and has no population.
    """
    if isinstance(task, Task):
        population = populate(file.population, task, file.seed)
        sizes = population.train.sizes.tolist()
        num_examples = dict(zip(map(ClientId, population.task.sites), sizes, strict=True))
        return population.task, num_examples, population, population.notes
    if file.population.kind != "natural":
        raise ConfigError([f"population: kind {file.population.kind!r} deals a Task's data; an ArrayTask has its own"])
    count = getattr(task, "num_examples", None)
    sites = tuple(getattr(task, "sites", ()))
    if not sites:
        raise ConfigError([f"{file.task}: the task has no sites, and so no clients to simulate"])
    if count is None:
        return task, dict.fromkeys(map(ClientId, sites), 1), None, ()
    by_site = {str(site): int(count(site)) for site in sites}
    if faults := [f"population: {fault}" for fault in faults_of_sizes(file.population, by_site)]:
        raise ConfigError(faults)
    filled = {ClientId(site): size for site, size in by_site.items() if size}
    empty = [site for site, size in by_site.items() if not size]
    return task, filled, None, (dropping(empty, len(by_site)),) if empty else ()


def _attacked(file: SimulationFile, task: Task | ArrayTask, names: Sequence[str]) -> tuple[Adversary, Task | ArrayTask]:
    """Return the adversary, and the task as its clients train it."""
    adversary = adversary_of(file.attack, names, file.seed)
    return adversary, adversary.task(task) if isinstance(task, Task) else task


def _cohort_faults(file: SimulationFile, num_clients: int) -> list[str]:
    needed = file.round.cohort_size if not file.round.is_asynchronous else file.round.concurrency
    if needed <= num_clients:
        return []
    name = "concurrency" if file.round.is_asynchronous else "cohort_size"
    return [f"round.{name}: got {needed}; allowed: at most {num_clients}, the number of clients"]
