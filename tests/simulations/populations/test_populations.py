"""A task whose data is dealt to clients: every example once, by seed, with all faults at the start."""

import time
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch.utils.data import Subset, TensorDataset

from atoll.protocol.settings import ConfigError
from atoll.simulations.populations.config import PopulationConfig
from atoll.simulations.populations.population import Population, names, populate
from atoll.simulations.populations.report import report
from atoll.task.task import Task
from atoll.training.data.batches import fetcher
from tests.simulations.populations.tasks import Listed, digits_task, labelled, places, task_of

KINDS: dict[str, dict[str, Any]] = {
    "iid": {},
    "dirichlet": {"alpha": 5.0},
    "dirichlet balanced": {"alpha": 0.5, "balanced": True},
    "shards": {"shards_per_client": 3},
    "quantity": {"alpha": 0.5},
    "quantity sigma": {"sigma": 1.5},
    "feature": {"change": "shift"},
}


def config_of(kind: str, clients: int, **more: Any) -> PopulationConfig:
    return PopulationConfig(kind=kind.split()[0], clients=clients, **(KINDS[kind] | more))


def faults(config: PopulationConfig, task: Task) -> str:
    with pytest.raises(ConfigError) as caught:
        populate(config, task, seed=0)
    return str(caught.value)


@pytest.mark.parametrize("kind", KINDS)
@given(data=st.data())
@settings(max_examples=15, deadline=None)
def test_every_example_belongs_to_exactly_one_client(kind: str, data: st.DataObject) -> None:
    clients = data.draw(st.integers(1, 12))
    sizes = data.draw(st.lists(st.integers(0, 90), min_size=1, max_size=3))
    if sum(sizes) < 40 * clients // 2:
        sizes.append(40 * clients)
    rng = np.random.default_rng(data.draw(st.integers(0, 99)))
    whole = labelled(rng.integers(0, 4, sum(sizes)))
    ends = np.cumsum(sizes)
    sites = {
        f"s{k}": Subset(whole, list(range(end - n, end))) for k, (end, n) in enumerate(zip(ends, sizes, strict=True))
    }
    held = populate(config_of(kind, clients), task_of(sites), seed=data.draw(st.integers(0, 99)))
    assert held.task.sites == names(clients)
    parts = [held.train.part(k) for k in range(clients)]
    assert sorted(place for part in parts for place in places(part)) == list(range(len(whole)))
    assert [len(part) for part in parts] == held.train.sizes.tolist()
    assert all(
        len(held.task.data(site, "train")) == len(part) > 0 for site, part in zip(names(clients), parts, strict=True)
    )


@pytest.mark.parametrize("kind", KINDS)
def test_the_same_seed_gives_the_same_clients_in_whatever_order_they_are_asked(kind: str) -> None:
    first, again, other = (populate(config_of(kind, 9), digits_task, seed=seed) for seed in (1, 1, 2))
    wanted = {site: fetched(first, site) for site in first.task.sites}
    for site in reversed(again.task.sites):
        assert torch.equal(fetched(again, site), wanted[site])
    assert not all(torch.equal(one, fetched(other, site)) for site, one in wanted.items() if True)


def fetched(held: Population, site: str, split: str = "train") -> torch.Tensor:
    dataset = held.task.data(site, split)
    inputs: torch.Tensor = fetcher(dataset)(torch.arange(len(dataset)))[0]
    return inputs


def test_a_seed_of_its_own_stands_above_the_run_s() -> None:
    config = config_of("iid", 5, seed=7)
    assert (
        populate(config, digits_task, seed=1).train.owner.tolist()
        == populate(config, digits_task, seed=2).train.owner.tolist()
    )
    assert populate(config, digits_task, seed=1).seed == 7


def test_natural_is_the_task_itself() -> None:
    task = task_of({"a": labelled([0, 1, 1]), "b": labelled([2])})
    held = populate(PopulationConfig(), task, seed=0)
    assert held.task is task
    assert held.train.sizes.tolist() == [3, 1]
    assert held.test is None


@pytest.mark.parametrize("kind", ["dirichlet", "dirichlet balanced", "shards"])
def test_test_data_follow_the_labels_of_the_training_data(kind: str) -> None:
    train, test = np.repeat(np.arange(5), 400), np.repeat(np.arange(5), 100)
    task = task_of(lambda site, split: labelled(test if split == "test" else train))
    held = populate(config_of(kind, 10), task, seed=3)
    assert held.test is not None
    for client in range(10):
        own = np.bincount(train[held.train.owner == client], minlength=5)
        tested = np.bincount(test[held.test.owner == client], minlength=5)
        assert (np.abs(tested - own / 4) < 1.001).all()
    assert sum(len(held.task.data(c, "test") or []) for c in held.task.sites) == 500


@pytest.mark.parametrize("kind", ["dirichlet", "dirichlet balanced", "shards"])
def test_labels_that_only_the_test_data_have_are_dealt_too(kind: str) -> None:
    task = task_of(lambda site, split: labelled([5, 7, 7, 9] * 20 if split == "test" else [7] * 90))
    held = populate(config_of(kind, 3), task, seed=1)
    there = [held.task.data(site, "test") for site in held.task.sites]
    assert sorted(place for part in there if part for place in places(part)) == list(range(80))


def test_a_client_without_test_data_has_none() -> None:
    task = task_of(lambda site, split: labelled([0] * (3 if split == "test" else 60)))
    held = populate(config_of("iid", 10), task, seed=3)
    sizes = [0 if (test := held.task.data(site, "test")) is None else len(test) for site in held.task.sites]
    assert sorted(sizes) == [0] * 7 + [1] * 3


def test_batches_come_by_one_index_operation_from_one_base() -> None:
    held = populate(config_of("dirichlet", 20), digits_task, seed=0)
    (base,) = {id(held.task.data(site, "train").dataset) for site in held.task.sites}
    assert base == id(digits_task.data("all", "train"))
    part = held.task.data("c0003", "train")
    images, targets = fetcher(part)(torch.tensor([2, 0]))
    assert torch.equal(images, torch.stack([part[2][0], part[0][0]]))
    assert torch.equal(targets, torch.stack([part[2][1], part[0][1]]))


def test_sites_of_tensors_are_pooled_into_tensors_and_others_stay() -> None:
    tensors = populate(config_of("iid", 2), task_of({"a": labelled([0, 1]), "b": labelled([2, 3])}), seed=0)
    assert type(tensors.task.data("c0000", "train").dataset) is TensorDataset
    listed = {"a": Listed([(torch.zeros(2), 0), (torch.ones(2), 1)]), "b": Listed([(torch.ones(2), 1)])}
    held = populate(config_of("iid", 3), task_of(listed), seed=0)
    rows = [fetcher(held.task.data(site, "train"))(torch.tensor([0])) for site in held.task.sites]
    assert sorted((x.sum().item(), y.item()) for x, y in rows) == [(0.0, 0), (2.0, 1), (2.0, 1)]


def test_targets_are_looked_at_once_and_not_at_all_where_labels_play_no_part() -> None:
    data = Listed([(torch.zeros(1), k % 3) for k in range(60)])
    populate(config_of("iid", 4), task_of({"a": data}), seed=0)
    assert data.reads == 0
    held = populate(config_of("shards", 4), task_of({"a": data}), seed=0)
    report(held)
    assert data.reads == 60


def test_targets_that_a_data_set_shows_are_taken_unless_they_are_transformed() -> None:
    class Shown(Listed):
        def __init__(self, targets: Any, items: list[Any], transform: Any = None) -> None:
            super().__init__(items)
            self.targets, self.target_transform = targets, transform

    items = [(torch.zeros(1), k % 3) for k in range(60)]
    shown = Shown([k % 3 for k in range(60)], items)
    held = populate(config_of("shards", 4), task_of({"a": shown}), seed=0)
    assert shown.reads == 1
    assert held.train.pool.labels.tolist() == [k % 3 for k in range(60)]
    moved = Shown([k % 3 + 1 for k in range(60)], items, transform=lambda k: k - 1)
    assert populate(config_of("shards", 4), task_of({"a": moved}), seed=0).train.pool.labels.max() == 2
    wrong = Shown([k % 3 + 1 for k in range(60)], items)
    assert populate(config_of("shards", 4), task_of({"a": wrong}), seed=0).train.pool.labels.max() == 2


def test_noise_grows_with_the_number_of_the_client() -> None:
    task = task_of({"a": TensorDataset(torch.zeros(4000, 5), torch.zeros(4000, dtype=torch.int64))})
    held = populate(config_of("feature", 4, change="noise", strength=0.8), task, seed=0)
    levels = [fetched(held, site).std().item() for site in held.task.sites]
    np.testing.assert_allclose(levels, [0.2, 0.4, 0.6, 0.8], rtol=0.05)
    assert torch.equal(fetched(held, "c0002"), fetched(held, "c0002"))


def test_a_shift_is_affine_and_the_same_in_training_and_test() -> None:
    values = torch.rand(200, 3)
    task = task_of(lambda site, split: TensorDataset(values, torch.zeros(200, dtype=torch.int64)))
    held = populate(config_of("feature", 3, change="shift", strength=0.5), task, seed=0)
    for client, site in enumerate(held.task.sites):
        fits = []
        for split, dealt in (("train", held.train), ("test", held.test)):
            assert dealt is not None
            before = values[dealt.owner == client].flatten().numpy()
            fits.append(np.polyfit(before, fetched(held, site, split).flatten().numpy(), 1))
        np.testing.assert_allclose(fits[0], fits[1], atol=1e-5)
        assert abs(fits[0][0] - 1) + abs(fits[0][1]) > 0.01


def test_rotation_turns_images_by_quarters() -> None:
    images = torch.rand(40, 1, 6, 6)
    task = task_of({"a": TensorDataset(images, torch.zeros(40, dtype=torch.int64))})
    held = populate(config_of("feature", 5, change="rotation"), task, seed=0)
    for client, site in enumerate(held.task.sites):
        turned = np.rot90(images[held.train.owner == client].numpy(), client % 4, (2, 3))
        np.testing.assert_array_equal(fetched(held, site).numpy(), turned)


def test_a_thousand_clients_of_sixty_thousand_examples_take_well_under_a_second() -> None:
    data = TensorDataset(torch.zeros(60_000, 1), torch.arange(60_000) % 10)
    for kind, more in (("dirichlet", {"alpha": 1.0}), ("dirichlet balanced", {}), ("shards", {}), ("iid", {})):
        began = time.process_time()
        held = populate(config_of(kind, 1000, **more), task_of({"a": data}), seed=0)
        for site in held.task.sites:
            held.task.data(site, "train")
        assert time.process_time() - began < 3.0, kind  # 0.2 s on an idle core


@pytest.mark.parametrize("sigma", [10.0, 1e9])
def test_however_large_sigma_is_everything_is_dealt(sigma: float) -> None:
    unchecked = config_of("quantity sigma", 4).model_copy(update={"sigma": sigma})  # the settings end at 10
    held = populate(unchecked, task_of({"a": labelled([0] * 50)}), seed=0)
    assert sorted(held.train.sizes.tolist()) == [1, 1, 1, 47]


@pytest.mark.parametrize(
    ("settings_", "fault"),
    [
        ({"kind": "natural", "clients": 3}, "clients is not an option of natural (allowed: none)"),
        ({"kind": "iid"}, "iid needs clients"),
        ({"kind": "dirichlet", "clients": 3}, "dirichlet needs alpha"),
        ({"kind": "dirichlet", "clients": 3, "alpha": 0.0}, "greater than 0"),
        ({"kind": "iid", "clients": 3, "alpha": 1.0, "sigma": 1.0}, "alpha, sigma is not an option of iid"),
        ({"kind": "quantity", "clients": 3}, "quantity needs one of alpha and sigma"),
        ({"kind": "quantity", "clients": 3, "alpha": 1.0, "sigma": 1.0}, "quantity needs one of alpha and sigma"),
        ({"kind": "quantity", "clients": 3, "sigma": 1e9}, "less than or equal to 10"),
        ({"kind": "feature", "clients": 3}, "feature needs change"),
        (
            {"kind": "feature", "clients": 3, "change": "rotation", "strength": 1.0},
            "strength is not an option of the change",
        ),
        ({"kind": "shards", "clients": 0}, "greater than or equal to 1"),
        ({"kind": "iid", "clients": 3, "balanced": True}, "balanced is not an option of iid"),
    ],
)
def test_settings_that_contradict_each_other_are_refused(settings_: dict[str, Any], fault: str) -> None:
    with pytest.raises(ValueError, match=r"option|needs|than") as caught:
        PopulationConfig(**settings_)
    assert fault in str(caught.value)


def test_what_these_data_cannot_give_is_said_with_the_numbers_at_fault() -> None:
    small = task_of({"a": labelled([0, 1, 2, 3, 4, 5])})
    assert faults(config_of("iid", 7), small) == "population: 7 clients: 7 examples needed, and the task has 6"
    assert faults(config_of("iid", 3, min_examples=4), small) == (
        "population: 3 clients with min_examples 4: 12 examples needed, and the task has 6"
    )
    assert faults(config_of("shards", 4), small) == (
        "population: 4 clients with 3 shards each: 12 examples needed, and the task has 6"
    )
    few = task_of({"a": labelled([0] * 50 + [1] * 50)})
    assert "had 0 examples or fewer, and min_examples is 1" in faults(config_of("dirichlet", 40, alpha=0.01), few)


@pytest.mark.slow
def test_natural_sites_without_data_are_all_named() -> None:
    task = task_of({"a": labelled([0]), "b": labelled([]), "c": None})
    way_out = "--drop-empty (population.drop_empty = true) leaves them out"
    assert faults(PopulationConfig(), task) == (
        f"population: 2 sites ('b', 'c') have no example to train on: {way_out}"
    )
    one = task_of({"a": labelled([0]), "b": labelled([])})
    assert faults(PopulationConfig(), one) == f"population: site 'b' has no example to train on: {way_out}"
    many = task_of({f"s{k}": labelled([0] * (k == 0)) for k in range(900)})
    assert faults(PopulationConfig(), many) == (
        "population: 899 sites ('s1', 's2', 's3', 's4', 's5' and 894 more) have no example to train on: " + way_out
    )
    small = faults(PopulationConfig(min_examples=3, drop_empty=True), task_of({"a": labelled([0]), "b": None}))
    assert small == "population: site 'a' has 1 example to train on, and min_examples is 3"
    for dropping in (False, True):
        none = faults(PopulationConfig(drop_empty=dropping), task_of({"b": labelled([]), "c": None}))
        assert none == "population: 2 sites ('b', 'c') have no example to train on, and there is no other site"
    assert faults(config_of("iid", 2), task_of({"b": labelled([])})) == (
        "population: 2 clients: 2 examples needed, and the task has 0"
    )
    assert "the task has no sites" in faults(config_of("iid", 2), task_of({}))


def test_sites_without_examples_are_left_out_with_their_test_data() -> None:
    def data(site: str, split: str) -> TensorDataset | None:
        train = {"a": [0, 1], "b": [], "c": None, "d": [2]}[site]
        labels = train if split == "train" else [3, 3]
        return None if labels is None else labelled(labels)

    task = task_of(data, sites=["a", "b", "c", "d"])
    held = populate(PopulationConfig(drop_empty=True), task, seed=0)
    only = populate(PopulationConfig(), task_of(data, sites=["a", "d"]), seed=0)
    assert held.task.sites == only.task.sites == ("a", "d")
    for one, other in ((held.train, only.train), (held.test, only.test)):
        assert one is not None
        assert other is not None
        assert one.sizes.tolist() == other.sizes.tolist()
        assert one.num_clients == 2
    assert report(held).clients == report(only).clients
    assert held.dropped == ("b", "c")
    assert (
        held.notes
        == report(held).notes
        == ("2 of 4 clients have no training examples and are left out, of evaluations too: b, c",)
    )
    assert only.notes == ()


@pytest.mark.parametrize("balanced", [False, True])
def test_a_dirichlet_split_leaves_out_its_empty_clients(balanced: bool) -> None:
    few = task_of(lambda site, split: labelled([0] * 9 + [1] * 9))
    alpha = {"alpha": 0.05, "balanced": balanced, "drop_empty": True}
    config = config_of("dirichlet balanced" if balanced else "dirichlet", 40, **alpha)
    held = populate(config, few, seed=3)
    kept, dropped = held.task.sites, held.dropped
    assert sorted([*kept, *dropped]) == list(names(40))
    assert len(dropped) >= 22
    assert held.train.sizes.min() >= 1
    assert held.test is not None
    parts = [held.task.data(site, "train") for site in kept]
    assert sorted(place for part in parts for place in places(part)) == list(range(18))
    tests = [part for site in kept if (part := held.task.data(site, "test")) is not None]
    assert sorted(place for part in tests for place in places(part)) == list(range(18))
    assert held.notes == (
        f"{len(dropped)} of 40 clients have no training examples and are left out, of evaluations too: "
        f"{', '.join(dropped[:5])} and {len(dropped) - 5} more",
    )


def test_the_clients_that_are_left_keep_their_draws() -> None:
    task = task_of(lambda site, split: labelled([0] * 50 + [1] * 50))
    dropping = populate(config_of("dirichlet", 12, alpha=5.0, drop_empty=True), task, seed=1)
    assert dropping.dropped == ()
    assert dropping.train.owner.tolist() == populate(config_of("dirichlet", 12), task, seed=1).train.owner.tolist()


@pytest.mark.parametrize("kind", KINDS)
def test_natural_owners_whose_data_are_dealt_anew_are_mentioned(kind: str) -> None:
    task = task_of({"a": labelled([0, 1] * 200), "b": labelled([0, 1] * 200), "c": labelled([])})
    assert populate(config_of(kind, 4), task, seed=0).notes == (
        "the data of 2 sites are pooled and split among 4 clients "
        f'(population.kind = "{kind.split()[0]}"): the task\'s own sites are not simulated',
    )
    assert populate(config_of(kind, 4), task_of({"all": labelled([0, 1] * 200)}), seed=0).notes == ()


@pytest.mark.parametrize(
    ("targets", "what"),
    [
        (torch.rand(30), "a target is float32 each, and a class label is one whole number"),
        (torch.zeros(30, 16, dtype=torch.int64), "a target is int64 of shape (16,), and"),
    ],
)
def test_targets_that_are_no_labels_are_told_with_the_kinds_that_are_possible(targets: torch.Tensor, what: str) -> None:
    task = task_of({"a": TensorDataset(torch.rand(30, 2), targets)})
    said = faults(config_of("shards", 3), task)
    assert said.startswith(f"population: kind shards needs class labels: {what}")
    assert said.endswith("possible are natural, iid, quantity, feature")
    assert report(populate(config_of("quantity", 3), task, seed=0)).labels is None


def test_items_that_are_no_pairs_are_told() -> None:
    task = task_of({"a": Listed([{"x": 1}] * 30)})
    assert "example 0 is dict, and must be (inputs, target)" in faults(config_of("shards", 3), task)


def test_inputs_that_cannot_be_changed_are_told_at_the_start() -> None:
    words = task_of({"a": TensorDataset(torch.zeros(30, 2, dtype=torch.int64), torch.zeros(30))})
    assert "inputs that are one tensor of floats, and they are torch.int64" in faults(config_of("feature", 3), words)
    flat = config_of("feature", 3, change="rotation")
    assert "rotation needs square images, and inputs have the shape (64,)" in faults(flat, digits_task)


def test_a_stranger_is_refused_by_name() -> None:
    with pytest.raises(ValueError, match="there is no client 'north'; there are 3, the first is c0000"):
        populate(config_of("iid", 3), digits_task, seed=0).task.data("north", "train")
