"""The statistics of the clients' data on this machine, equal to those that `atoll run statistics` collects from sites.

The same functions make, merge and show them, and the sums are exact: on the same data all numbers agree bit for bit. No
policy withholds anything here.
"""

from typing import Any

from atoll.protocol.disclosure import Disclosure, MetricsLeave
from atoll.protocol.settings import ConfigError
from atoll.protocol.vocabulary import ClientId
from atoll.server.statistics.merging import document, shown
from atoll.simulations.federation.config import SimulationFile
from atoll.simulations.federation.setting import as_given
from atoll.simulations.populations.population import populate
from atoll.task.array_task import ArrayTask
from atoll.task.context import context_of, within
from atoll.task.deadline import Deadline
from atoll.task.randomness import DATA_SEED, data_of, seeded
from atoll.task.task import Task
from atoll.training.statistics.of_data import of_task
from atoll.training.statistics.own import of_array_task
from atoll.training.statistics.parts import SPLITS, SiteStatistics

ALONE = Disclosure(MetricsLeave.PER_SITE)


def statistics_of(file: SimulationFile, task: Task | ArrayTask) -> dict[str, Any]:
    """Return the statistics of all clients together and of each one, in the form of a collection's result.

    Args:
        file: the settings; of a population other than "natural" the data is dealt first.
        task: the user's task.

    Raises:
        ConfigError: the task has no sites or no statistics, or the settings do not fit it.
    """
    task = as_given(file, task)
    if file.population.kind != "natural":
        if not isinstance(task, Task):
            kind = file.population.kind
            raise ConfigError([f"population: kind {kind!r} splits a Task's data; an ArrayTask reads its data itself"])
        task = populate(file.population, task, file.seed).task
    sites = [str(site) for site in getattr(task, "sites", ())]
    if not sites:
        raise ConfigError([f"{file.task}: the task has no sites: Task(sites=...) names them"])
    answers = {ClientId(site): _of_site(task, site, file.seed) for site in sites}
    found = document(shown(answers, dict.fromkeys(answers, ALONE)))
    return {"task": file.task, "asked": sites, "answered": sites, "refused": {}, **found}


def _of_site(task: Task | ArrayTask, site: str, seed: int) -> SiteStatistics:
    context = context_of(task, site=site, seed=seed)
    if isinstance(task, Task):
        datasets = {split: data_of(task, site, split) for split in SPLITS}
        with within(context):
            return of_task(task, datasets, Deadline.never())
    with seeded(DATA_SEED), within(context):
        return of_array_task(task, site)
