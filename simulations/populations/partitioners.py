"""The partitioners of flwr-datasets as kinds of populations, by their references: `flwr_datasets.partitioner:NAME`.

A partitioner gets a dataset of one row for each training example, with the columns `index`, `site` (the number of its
site) and, where targets are classes, `label`. As in Flower's `FederatedDataset`, the rows are shuffled first.
"""

import inspect
from collections.abc import Mapping
from typing import Any

import numpy as np

from atoll.ground.printable import count_of
from atoll.simulations.populations.partitions import Impossible, Ints
from atoll.simulations.populations.pool import NoLabels, Pool

INDEX, LABEL, SITE = "index", "label", "site"


def is_partitioner(found: object) -> bool:
    """Return whether an object is a class of partitioners: its instances take a `dataset` and load parts of it."""
    return isinstance(found, type) and callable(getattr(found, "load_partition", None)) and hasattr(found, "dataset")


def partitioned(
    kind: type[Any], pool: Pool, site: Ints, clients: int, rng: np.random.Generator, options: Mapping[str, Any]
) -> Ints:
    """Return the client of each example (N,): client k has partition k.

    Args:
        kind: the class of the partitioner.
        pool: the training examples.
        site: the number of the site of each example (N,).
        clients: the number of partitions, unless the partitioner finds it in the data.
        rng: draws the seeds of the shuffle and of the partitioner.
        options: arguments of the partitioner; `partition_by` is by default "label".

    Raises:
        NoLabels: the partitioner uses labels, and a target is not one whole number.
        Impossible: the partitioner makes another number of partitions, or leaves out or repeats an example.
        Exception: any error that the partitioner raises.
    """
    import datasets

    takes, seeds = inspect.signature(kind).parameters, rng.integers(2**31, size=2).tolist()
    defaults = {"num_partitions": clients, "partition_by": LABEL, "seed": seeds[1]}
    partitioner = kind(**{**{name: value for name, value in defaults.items() if name in takes}, **options})
    datasets.disable_progress_bars()
    partitioner.dataset = datasets.Dataset.from_dict(_columns(pool, site, partitioner)).shuffle(seed=seeds[0])
    if (number := partitioner.num_partitions) != clients:
        raise Impossible(
            f"{kind.__name__} makes {count_of(number, 'partition')} of these data; population.clients must be {number}"
        )
    owner = np.full(len(pool), -1)
    for client in range(clients):
        part = partitioner.load_partition(client)
        if INDEX not in part.column_names:
            raise Impossible(f"a population divides examples; {kind.__name__} divides each by columns")
        indices = np.asarray(list(part[INDEX]), np.int64)
        if len(np.unique(indices)) < len(indices):
            raise Impossible(f"{kind.__name__} gives an example to a client twice; each belongs to one, once")
        if (owner[indices] >= 0).any():
            raise Impossible(f"{kind.__name__} gives an example to two clients; each belongs to one")
        owner[indices] = client
    if left := int((owner < 0).sum()):
        raise Impossible(
            f"{kind.__name__} leaves {count_of(left, 'example')} to no client; each example belongs to one"
        )
    return owner


def _columns(pool: Pool, site: Ints, partitioner: Any) -> dict[str, Any]:
    """Return the columns; labels are read only where they exist.

    Raises:
        NoLabels: the partitioner asks for labels that do not exist.
    """
    columns = {INDEX: np.arange(len(pool)), SITE: site}
    try:
        columns[LABEL] = pool.labels
    except NoLabels:
        if getattr(partitioner, "_partition_by", "") == LABEL:
            raise
    return columns
