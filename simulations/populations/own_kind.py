"""The kind of population of a user's own: a function that names the client of each training example."""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, cast

import numpy as np

from atoll.aggregation.printable import count_of
from atoll.simulations.populations.config import PopulationConfig
from atoll.simulations.populations.flower_partitioners import is_partitioner, partitioned
from atoll.simulations.populations.kinds import POPULATION_EXTENSION
from atoll.simulations.populations.partitions import Impossible, Ints
from atoll.simulations.populations.pool import NoLabels, Pool


@dataclass(frozen=True)
class Examples:
    """The pooled training examples, in the order of the task's sites, as a user's function sees them."""

    pool: Pool
    sites: tuple[str, ...]
    """The task's sites that have training data."""

    def __len__(self) -> int:
        return len(self.pool)

    @property
    def site(self) -> Ints:
        """The number of the site that has each example (N,), in the order of `sites`."""
        return np.repeat(np.arange(len(self.sites)), self.pool.sizes)

    @property
    def labels(self) -> Ints:
        """The class of each example (N,).

        Raises:
            NoLabels: a target is not one whole number.
        """
        return self.pool.labels


Deal = Callable[..., Any]
"""(examples, clients, rng, **options) -> the number of the client of each example, in 0..clients-1."""


def dealt(config: PopulationConfig, examples: Examples, rng: np.random.Generator) -> Ints:
    """Return the client of each example (N,) by the user's function, or by a partitioner of flwr-datasets.

    Raises:
        ConfigError: there is no such function.
        Impossible: it raised, or its answer is no client for each example.
    """
    assert config.clients is not None
    deal = cast(Deal, POPULATION_EXTENSION.load(config.kind))
    try:
        if is_partitioner(deal):
            return partitioned(deal, examples.pool, examples.site, config.clients, rng, config.options)  # type: ignore[arg-type]
        answer = deal(examples, config.clients, rng, **config.options)
        owner = np.asarray(answer)
    except (NoLabels, Impossible):
        raise
    except Exception as error:  # the user's code runs here and may raise anything
        raise Impossible(f"kind {config.kind} raised {type(error).__name__}: {error}") from error
    every = count_of(len(examples), "example")
    allowed = f"allowed: a whole number in 0..{config.clients - 1} for each of the {every}, in order"
    if owner.shape != (len(examples),) or owner.dtype.kind not in "iu":
        gave = f"{type(answer).__name__} of shape {owner.shape} and dtype {owner.dtype}"
        raise Impossible(f"kind {config.kind} gave {gave}; {allowed}")
    if len(owner) and not (int(owner.min()) >= 0 and int(owner.max()) < config.clients):
        raise Impossible(f"kind {config.kind} gave numbers in {owner.min()}..{owner.max()}; {allowed}")
    return owner.astype(np.int64)


def labels_if_any(pools: tuple[Pool, Pool]) -> tuple[list[Ints], int]:
    """Return the labels of both pools as numbers 0..L-1, and L; zeros and 1 where the targets are no labels.

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
