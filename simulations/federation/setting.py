"""The setting of a federation, built from its settings: clients, devices, data, training, adversary."""

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import replace
from typing import TypeVar

from atoll.ground.faults import faults_in
from atoll.protocol.settings import ConfigError, or_faults
from atoll.protocol.vocabulary import ClientId
from atoll.simulations.attacks.adversary import Adversary
from atoll.simulations.attacks.build import adversary_of
from atoll.simulations.attacks.config import OF_COORDINATOR
from atoll.simulations.attacks.disclosure import Disclosure
from atoll.simulations.federation.config import SimulationFile
from atoll.simulations.federation.federation import Setting
from atoll.simulations.federation.private_noise import faults_of_noise_cohort
from atoll.simulations.federation.row_trial import try_rows
from atoll.simulations.federation.training_engine import training_of
from atoll.simulations.populations.empty_clients import dropping, faults_of_sizes
from atoll.simulations.populations.facts import ReadFacts
from atoll.simulations.populations.population import Population, populate
from atoll.simulations.populations.report import report
from atoll.task.apps import is_app
from atoll.task.array_task import ArrayTask
from atoll.task.array_values import tuned
from atoll.task.context import context_of, within
from atoll.task.given import Given
from atoll.task.task import Task

Read = TypeVar("Read")


def setting_of(file: SimulationFile, task: Task | ArrayTask, read: ReadFacts | None = None) -> Setting:
    """Build and check all parts that the settings name, before the first round begins.

    Args:
        file: the settings.
        task: the task that they name.
        read: (task) -> the facts of its sites, if they are the clients; None: their data is read.

    Raises:
        ConfigError: the settings have faults, such as an impossible population, an attack with more malicious
            clients than there are, a rule that does not load, a run of messages; the message lists all of them.
        TaskBroken: the model, the loss or a metric cannot process the rows of a client, or of the server.
    """
    if file.run.is_of_messages:
        what = f"program.main: got {file.program.main!r}, and a run of messages has no rounds"
        ways = ["`atoll simulate` and `atoll flower run --simulate` run it"]
        ways += ["program.native=true turns a Flower app into rounds"] if is_app(file.run.task) else []
        raise ConfigError([f"{what}; allowed here: none. {'; '.join(ways)}"])
    faults: list[str] = []
    sampler = or_faults(file.cohort.build, faults)
    task = or_faults(lambda: as_given(file, task), faults) or task
    training = or_faults(lambda: training_of(file.simulation, task, file.run), faults)
    found = or_faults(lambda: populated(file, task, read), faults)
    if found is None:
        raise ConfigError(list(dict.fromkeys(faults)))  # without clients the other parts cannot be checked
    populated_task, num_examples, population, notes = found
    names = [str(name) for name in num_examples]
    attacked = or_faults(lambda: _attacked(file, populated_task, names), faults)
    fleet = or_faults(lambda: file.devices.of(names, seed=file.seed), faults)
    faults += _cohort_faults(file, len(names))
    faults += faults_of_noise_cohort(file.run, file.simulation.noise_cohort_size)
    if file.privacy is not None:
        faults += file.privacy.faults_of_delta(len(names))
        faults += file.privacy.faults_of_separation(len(names), file.run.round.cohort_size)
    if faults or sampler is None or training is None or attacked is None or fleet is None:
        raise ConfigError(list(dict.fromkeys(faults)))  # two parts may have found the same fault
    adversary, poisoned, disclosure = attacked
    if population is not None:
        try_rows(population, file.run, file.simulation.device)
    return Setting(
        config=file.run,
        task=poisoned,
        num_examples=num_examples,
        num_test_examples=_test_sizes(population),
        are_sizes_kept=population is not None and population.are_kept,
        fleet=fleet,
        training=replace(training, task=poisoned),
        simulation=file.simulation,
        sampler=sampler,
        adversary=adversary,
        disclosure=disclosure,
        lies=file.attack.kind == "lying_coordinator",
        lease=file.coordinator.lease,
        population_report=None if population is None else lambda: report(population).plain(),
        notes=notes,
    )


def as_given(file: SimulationFile, task: Task | ArrayTask) -> Task | ArrayTask:
    """Return the task with the run's options and the sites' settings, after checking its settings in every round.

    Raises:
        ConfigError: the task does not allow the settings.
    """
    faults: list[str] = []
    given = or_faults(lambda: _read(lambda: Given.read(file.run.given)), faults)
    if given is None:
        raise ConfigError(faults)
    if isinstance(task, Task):
        local = task.local
        or_faults(lambda: _read(lambda: given.check(local, file.rounds)), faults)
    else:
        or_faults(lambda: _read(lambda: given.overrides(1)), faults)
    tuned_task = or_faults(lambda: _read(lambda: tuned(task, given.options, file.sites)), faults)
    if faults or tuned_task is None:
        raise ConfigError(faults)
    return tuned_task


def _read(read: Callable[[], Read]) -> Read:
    """Return the result of `read` for a task's settings; raise ConfigError if the task refuses them."""
    try:
        return read()
    except ValueError as error:
        raise ConfigError(faults_in(error)) from error


def populated(
    file: SimulationFile, task: Task | ArrayTask, read: ReadFacts | None = None
) -> tuple[Task | ArrayTask, Mapping[ClientId, int], Population | None, tuple[str, ...]]:
    """Return the task with the clients as its sites, the number of examples of each, their population, and its notes.

    An `ArrayTask` reads its data itself, and has no population.
    """
    if isinstance(task, Task):
        population = populate(file.population, task, file.seed, read)
        sizes = population.train.sizes.tolist()
        num_examples = dict(zip(map(ClientId, population.task.sites), sizes, strict=True))
        return population.task, num_examples, population, population.notes
    if file.population.kind != "natural":
        raise ConfigError(
            [f"population: kind {file.population.kind!r} splits a Task's data; an ArrayTask reads its data itself"]
        )
    count = getattr(task, "num_examples", None)
    sites = tuple(getattr(task, "sites", ()))
    if not sites:
        raise ConfigError([f"{file.task}: the task has no sites, and so no clients to simulate"])
    if count is None:
        return task, dict.fromkeys(map(ClientId, sites), 1), None, ()
    by_site = {str(site): _size_of(task, site, count) for site in sites}
    if faults := [f"population: {fault}" for fault in faults_of_sizes(file.population, by_site)]:
        raise ConfigError(faults)
    filled = {ClientId(site): size for site, size in by_site.items() if size}
    empty = [site for site, size in by_site.items() if not size]
    return task, filled, None, (dropping(empty, len(by_site)),) if empty else ()


def _test_sizes(population: Population | None) -> Mapping[ClientId, int] | None:
    """Return the number of test examples of each client; None: the task reads its data itself."""
    if population is None:
        return None
    sizes = [0] * population.train.num_clients if population.test is None else population.test.sizes.tolist()
    return dict(zip(map(ClientId, population.task.sites), sizes, strict=True))


def _size_of(task: ArrayTask, site: str, count: Callable[[str], int]) -> int:
    with within(context_of(task, site=site)):
        return int(count(site))


def _attacked(
    file: SimulationFile, task: Task | ArrayTask, names: Sequence[str]
) -> tuple[Adversary, Task | ArrayTask, Disclosure | None]:
    """Return the adversary, the task as its clients train it, and what the coordinator infers.

    Raises:
        ConfigError: the attack is impossible.
    """
    if faults := [*_faults_of_coordinator(file)]:
        raise ConfigError(faults)
    disclosure = _disclosure(file, task, names)
    adversary = adversary_of(file.attack, names, file.seed)
    if adversary.forges and file.aggregation.grows:
        what = f"attack.kind: got {file.attack.kind!r}, which forges differences between models"
        raise ConfigError([f"{what}, and under rule concatenate an update has rows to append; allowed: none"])
    return adversary, adversary.task(task) if isinstance(task, Task) else task, disclosure


def _faults_of_coordinator(file: SimulationFile) -> Iterator[str]:
    """Yield why an attack of the coordinator has nothing to attack in this run."""
    kind, is_secure = file.attack.kind, file.secure is not None
    if kind not in OF_COORDINATOR:
        return
    got = f"attack.kind: got {kind!r}"
    if is_secure and file.simulation.secure == "fast":
        way_out = 'allowed: simulation.secure = "real"'
        yield f'{got}, and with simulation.secure = "fast" nothing is masked or signed; {way_out}'
    if kind == "lying_coordinator" and not is_secure:
        yield f"{got}, which lies to the members of secure sums, and the run has none; allowed: a run with [secure]"
    if kind != "lying_coordinator" and file.aggregation.grows:
        yield f"{got}, and under rule concatenate an update has rows to append; allowed: none"


def _disclosure(file: SimulationFile, task: Task | ArrayTask, names: Sequence[str]) -> Disclosure | None:
    kind = file.attack.kind
    if kind != "inversion" and kind != "membership":
        return None
    if not isinstance(task, Task):
        raise ConfigError(
            [f"attack.kind: got {kind!r}, which needs the model and loss of a Task; the task trains itself"]
        )
    found = Disclosure(kind, task, names, file.seed)
    if faults := [*found.faults()]:
        raise ConfigError(faults)
    return found


def _cohort_faults(file: SimulationFile, num_clients: int) -> list[str]:
    needed = file.round.cohort_size if not file.round.is_asynchronous else file.round.concurrency
    if needed <= num_clients:
        return []
    name = "concurrency" if file.round.is_asynchronous else "cohort_size"
    return [f"round.{name}: got {needed}; allowed: at most {num_clients}, the number of clients"]
