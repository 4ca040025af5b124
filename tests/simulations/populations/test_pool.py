"""Several data sets as one: labels and parts equal those of a plain loop over the items, at any nesting."""

import pickle
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch.utils.data import ConcatDataset, Dataset, Subset

from atoll.simulations.populations.config import PopulationConfig
from atoll.simulations.populations.pool import NoLabels, Pool, labels_of
from atoll.simulations.populations.population import populate
from atoll.training.data.batches import fetcher
from tests.simulations.populations.tasks import Listed, digits_task, labelled


@st.composite
def nested(draw: st.DrawFn, depth: int = 3) -> "Dataset[Any]":
    """A data set of tensors or of a list, or a part of one, or several in a row."""
    labels = draw(st.lists(st.integers(0, 9), min_size=1, max_size=8))
    kind = draw(st.sampled_from(["tensors", "list", "part", "row"] if depth else ["tensors", "list"]))
    if kind == "tensors":
        return labelled(labels)
    if kind == "list":
        return Listed([(torch.tensor([float(k)]), torch.tensor(label)) for k, label in enumerate(labels)])
    if kind == "row":
        return ConcatDataset(draw(st.lists(nested(depth=depth - 1), min_size=1, max_size=3)))
    base: Any = draw(nested(depth=depth - 1))
    places = draw(st.lists(st.integers(0, len(base) - 1), min_size=1, max_size=8))
    return Subset(base, draw(st.sampled_from([places, np.array(places), torch.tensor(places)])))


def items(dataset: Any) -> list[tuple[float, int]]:
    return [(float(dataset[k][0]), int(dataset[k][1])) for k in range(len(dataset))]


@given(nested())
@settings(max_examples=60, deadline=None)
def test_labels_are_those_of_the_items(dataset: Any) -> None:
    assert labels_of(dataset).tolist() == [label for _, label in items(dataset)]


@given(st.lists(nested(depth=2), min_size=1, max_size=4), st.data())
@settings(max_examples=40, deadline=None)
def test_a_part_of_a_pool_has_the_items_of_its_data_sets_in_a_row(datasets: list[Any], data: st.DataObject) -> None:
    pool, expected = Pool(datasets), [item for dataset in datasets for item in items(dataset)]
    assert len(pool) == len(expected)
    places = data.draw(st.lists(st.integers(0, len(expected) - 1), min_size=1, max_size=6))
    part = pool.part(np.array(places))
    assert items(part) == [expected[place] for place in places]
    inputs, targets = fetcher(part)(torch.arange(len(places)))
    assert list(zip(inputs[:, 0].tolist(), targets.tolist(), strict=True)) == [expected[place] for place in places]
    assert pool.labels.tolist() == [label for _, label in expected]


def test_parts_of_one_data_set_are_pooled_without_a_copy() -> None:
    whole = labelled([0, 1, 2, 3])
    part = Pool([Subset(whole, [3, 0]), Subset(whole, [1])]).part(np.array([0, 2]))
    assert part.dataset is whole
    assert items(part) == [(3.0, 3), (1.0, 1)]


def test_targets_of_different_shapes_are_no_labels() -> None:
    with pytest.raises(NoLabels, match="the targets differ in shape or kind"):
        labels_of(Listed([(0, torch.zeros(2)), (0, torch.zeros(3))]))


def test_what_clients_hold_can_be_sent_to_another_process() -> None:
    held = populate(PopulationConfig(kind="dirichlet", clients=5, alpha=1), digits_task, seed=0)
    there = pickle.loads(pickle.dumps(held.task.data))
    for site in held.task.sites:
        one, other = (fetcher(data(site, "train"))(torch.arange(5)) for data in (held.task.data, there))
        assert all(torch.equal(a, b) for a, b in zip(one, other, strict=True))


def test_a_part_reads_its_data_by_pythons_own_integers() -> None:
    """A data set may seed a generator by the index, which no integer of numpy can."""

    class Drawing(Dataset[Any]):
        def __len__(self) -> int:
            return 4

        def __getitem__(self, index: int) -> Any:
            return torch.randn(2, generator=torch.Generator().manual_seed(index)), index

    data = Drawing()
    assert Pool([data]).part(np.array([3, 1]))[0][1] == 3
    assert Pool([Subset(data, [2, 0])]).part(np.array([1]))[0][1] == 0
