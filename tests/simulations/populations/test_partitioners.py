"""Partitioners of flwr-datasets as populations, on local data; skipped where flwr-datasets is not installed."""

from importlib.util import find_spec

import numpy as np
import pytest

from atoll.protocol.settings import ConfigError
from atoll.simulations.populations.config import PopulationConfig
from atoll.simulations.populations.population import populate
from tests.simulations.populations.tasks import labelled, task_of

pytestmark = [
    pytest.mark.filterwarnings("ignore"),  # those of the partitioners themselves
    pytest.mark.skipif(
        find_spec("flwr_datasets") is None, reason="flwr-datasets is not installed: `make setup` installs it"
    ),
]
DATA = {"a": labelled([n % 4 for n in range(120)]), "b": labelled([n % 4 for n in range(60)])}


def owners(name, clients=4, *, seed=0, data=DATA, **options):
    kind = f"flwr_datasets.partitioner:{name}"
    config = PopulationConfig(kind=kind, clients=clients, options=options, min_examples=1)
    return populate(config, task_of(data), seed=seed).train


def labels_of(partition):
    labels = partition.pool.labels
    return [sorted(set(labels[partition.owner == client].tolist())) for client in range(partition.num_clients)]


def test_iid_gives_equal_parts_of_shuffled_examples():
    partition = owners("IidPartitioner")
    assert partition.sizes.tolist() == [45] * 4
    assert labels_of(partition) == [[0, 1, 2, 3]] * 4
    assert not np.array_equal(partition.owner, np.sort(partition.owner))


def test_dirichlet_depends_on_the_seed_of_the_run():
    first, again, other = (owners("DirichletPartitioner", alpha=1.0, min_partition_size=1, seed=s) for s in (1, 1, 2))
    assert np.array_equal(first.owner, again.owner)
    assert not np.array_equal(first.owner, other.owner)
    assert first.sizes.sum() == 180


def test_pathological_gives_each_client_its_labels():
    options = {"num_classes_per_partition": 2, "class_assignment_mode": "deterministic"}
    assert labels_of(owners("PathologicalPartitioner", **options)) == [[0, 1], [1, 2], [2, 3], [0, 3]]


def test_sizes_may_grow_linearly():
    assert owners("LinearPartitioner", clients=3).sizes.tolist() == [30, 60, 90]


def test_the_sites_are_a_column_of_their_own():
    assert owners("NaturalIdPartitioner", clients=2, partition_by="site").sizes.tolist() == [120, 60]


@pytest.mark.parametrize(
    ("name", "clients", "options", "told"),
    [
        (
            "NaturalIdPartitioner",
            3,
            {"partition_by": "site"},
            "makes 2 partitions of these data; population.clients must be 2",
        ),
        ("DirichletPartitioner", 3, {}, "missing 1 required positional argument: 'alpha'"),
        ("VerticalEvenPartitioner", 3, {}, "VerticalEvenPartitioner divides each by columns"),
        ("PathologicalPartitioner", 2, {"num_classes_per_partition": 1}, "leaves 90 examples to no client"),
    ],
)
def test_what_is_no_population_is_refused_by_name(name, clients, options, told):
    with pytest.raises(ConfigError, match=told):
        owners(name, clients, **options)


def test_data_without_labels_are_told():
    import torch
    from torch.utils.data import TensorDataset

    data = {"a": TensorDataset(torch.zeros(20, 1), torch.rand(20))}
    assert owners("IidPartitioner", clients=2, data=data).sizes.tolist() == [10, 10]
    with pytest.raises(ConfigError, match="label"):
        owners("DirichletPartitioner", clients=2, data=data, alpha=1.0)
