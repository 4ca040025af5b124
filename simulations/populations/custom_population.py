"""A custom population: a function that names the client of each training example."""

from dataclasses import dataclass
from typing import Any

import numpy as np

from atoll.ground.printable import count_of
from atoll.plugins.guard import called
from atoll.simulations.populations.config import PopulationConfig
from atoll.simulations.populations.kinds import CUSTOM_POPULATION
from atoll.simulations.populations.partitioners import is_partitioner, partitioned
from atoll.simulations.populations.partitions import Impossible, Ints
from atoll.simulations.populations.pool import NoLabels, Pool


@dataclass(frozen=True)
class Examples:
    """Pooled training examples, in the order of the task's sites, as a custom function sees them."""

    pool: Pool
    sites: tuple[str, ...]
    """The task's sites that have training data."""

    def __len__(self) -> int:
        return len(self.pool)

    @property
    def site(self) -> Ints:
        """The number of the site of each example (N,), in the order of `sites`."""
        return np.repeat(np.arange(len(self.sites)), self.pool.sizes)

    @property
    def labels(self) -> Ints:
        """The class of each example (N,).

        Raises:
            NoLabels: a target is not one whole number.
        """
        return self.pool.labels


def dealt(config: PopulationConfig, examples: Examples, rng: np.random.Generator) -> Ints:
    """Return the client of each example (N,) by the user's function, or by a partitioner of flwr-datasets.

    Raises:
        ConfigError: there is no such function.
        Impossible: it raised, or its result is not a client for each example.
    """
    clients = config.clients
    assert clients is not None
    deal, name = CUSTOM_POPULATION.load(config.kind), f"kind {config.kind}"

    def owners() -> tuple[Any, Ints]:
        if is_partitioner(deal):
            answer = partitioned(deal, examples.pool, examples.site, clients, rng, config.options)
        else:
            answer = deal(examples, clients, rng, **config.options)
        return answer, np.asarray(answer)

    answer, owner = called(name, owners, failed=Impossible, passing=(NoLabels, Impossible))
    every = count_of(len(examples), "example")
    allowed = f"allowed: a whole number in 0..{clients - 1} for each of the {every}, in order"
    if owner.shape != (len(examples),) or owner.dtype.kind not in "iu":
        gave = f"{type(answer).__name__} of shape {owner.shape} and dtype {owner.dtype}"
        raise Impossible(f"{name} gave {gave}; {allowed}")
    if len(owner) and not (int(owner.min()) >= 0 and int(owner.max()) < clients):
        raise Impossible(f"{name} gave numbers in {owner.min()}..{owner.max()}; {allowed}")
    found: Ints = owner.astype(np.int64)
    return found


def labels_if_any(pools: tuple[Pool, Pool]) -> tuple[list[Ints], int]:
    """Return the labels of both pools as numbers 0..L-1, and L; zeros and 1 if the targets are not labels.

    Without test examples, which follow the labels of the training examples, nothing is read.
    """
    zeros = [np.zeros(len(pool), np.int64) for pool in pools]
    if not len(pools[1]):
        return zeros, 1
    try:
        classes = np.unique(np.concatenate([pool.labels for pool in pools]))
    except NoLabels:
        return zeros, 1
    return [np.searchsorted(classes, pool.labels) for pool in pools], len(classes)
