"""The trial of a simulated run's task on a batch of rows of clients and server, before the first round.

Only one client for each kind of rows is tried: sites may have rows of different dtypes or shapes.
"""

from collections.abc import Iterator
from dataclasses import replace

from atoll.server.config.run import RunConfig
from atoll.simulations.populations.facts import OwnSites
from atoll.simulations.populations.population import Population
from atoll.task.context import context_of
from atoll.task.given import Given
from atoll.task.randomness import data_of, server_data_of
from atoll.task.task import Task
from atoll.training.data.row_forms import kind_of
from atoll.training.trials.first_batch import Batches, Rows, first_batch, first_of_kinds
from atoll.training.trials.trial import refuse


def try_rows(population: Population, config: RunConfig, device: str) -> None:
    """Try the model, the loss and the metrics of a task on rows of its clients and of the server.

    Args:
        population: the clients, and the task.
        config: the config of the run.
        device: the device of the trainings.

    Raises:
        TaskBroken: the model, the loss or a metric cannot process a row.
    """
    task, evaluation = population.task, config.evaluation
    local = Given.read(config.given).local_of(task.local, 1)
    like = Rows(data=None, where="", context=context_of(task, seed=config.seed), at_once=local.batch_size)
    clients, are_measured = _clients(population), bool(evaluation.clients_every)
    every = [*_of_clients(population, like, clients, are_measured)]
    own = server_data_of(task) if evaluation.server_every else None
    if own is not None:
        every.append(Rows(data=own, where="task.test_data()", context=like.context))
    if every:
        unmeasured = () if are_measured else _of_splits(task, like, clients, ["test"])
        refuse([first_batch], Batches(task=task, every=every, seed=config.seed, device=device, unmeasured=unmeasured))


def _of_clients(population: Population, like: Rows, clients: list[str], are_measured: bool) -> Iterator[Rows]:
    """Yield the training rows, if the built-in loop reads them, and the test rows, if clients evaluate."""
    task = population.task
    splits = [*(["train"] if task.fit is None else []), *(["test"] if are_measured else [])]
    yield from _of_splits(task, like, clients, splits)
    if isinstance(population.train, OwnSites) or population.skew is not None:
        return
    pool = population.train.pool
    kinds = {kind_of(data, reads=False): place for place, data in enumerate(pool.datasets) if len(data)}
    if len(kinds) > 1 and task.fit is None:  # sites whose rows were dealt have different ones
        for place in kinds.values():
            yield replace(like, data=pool.datasets[place], where=f"the {pool.names[place]}", is_trained=True)


def _of_splits(task: Task, like: Rows, clients: list[str], splits: list[str]) -> Iterator[Rows]:
    for site in clients:
        for split in splits:
            data = data_of(task, site, split)
            if data is not None and len(data):
                where, context = f"the {split} data of client {site!r}", replace(like.context, site=site)
                yield replace(like, data=data, where=where, context=context, is_trained=split == "train")


def _clients(population: Population) -> list[str]:
    """Return the first client of each kind of rows; if rows were dealt, only the first."""
    sites, facts = population.task.sites, population.train.facts if isinstance(population.train, OwnSites) else None
    sizes = dict(zip(sites, population.train.sizes.tolist(), strict=True))
    if facts is None:
        return first_of_kinds(dict.fromkeys((site for site in sites if sizes[site]), ""), sizes)
    kinds = {site: kind for site, kind in zip(sites, facts.rows, strict=True) if sizes[site]}
    return first_of_kinds(kinds, sizes)
