"""The kind of population of a user's own: each example goes where the function says, or the split is refused."""

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch.utils.data import TensorDataset

from atoll.protocol.settings import ConfigError
from atoll.simulations.populations.config import PopulationConfig
from atoll.simulations.populations.population import Population, populate
from tests.plugins.packages import install
from tests.simulations.populations.tasks import labelled, task_of

KIND = """
import numpy as np


def by_label(examples, clients, rng, shift=0):
    return (examples.labels + shift) % clients


def by_site(examples, clients, rng):
    assert examples.sites == ("a", "b"), examples.sites
    return examples.site


def by_lot(examples, clients, rng):
    return list(rng.integers(clients, size=len(examples)))


def first(examples, clients, rng):
    return np.zeros(len(examples), int)


def short(examples, clients, rng):
    return [0]


def beyond(examples, clients, rng):
    return [clients] * len(examples)


def broken(examples, clients, rng):
    return {}["none"]
"""
DATA = {"a": labelled([0, 1, 2, 0]), "b": labelled([2, 2, 1])}


@pytest.fixture
def place(tmp_path: Path) -> str:
    (tmp_path / "kinds.py").write_text(KIND)
    return str(tmp_path / "kinds.py")


def owners(kind: str, clients: int = 2, seed: int = 0, data: Any = None, **settings: Any) -> Population:
    return populate(PopulationConfig(kind=kind, clients=clients, **settings), task_of(data or DATA), seed=seed)


def test_each_example_goes_to_the_client_that_the_function_names(place: str) -> None:
    assert owners(f"{place}:by_label", 3).train.owner.tolist() == [0, 1, 2, 0, 2, 2, 1]
    assert owners(f"{place}:by_label", 3, options={"shift": 1}).train.owner.tolist() == [1, 2, 0, 1, 0, 0, 2]
    assert owners(f"{place}:by_site").train.owner.tolist() == [0, 0, 0, 0, 1, 1, 1]
    held = owners(f"{place}:by_lot", seed=3)
    assert held.task.sites == ("c0000", "c0001")
    assert held.train.owner.tolist() == owners(f"{place}:by_lot", seed=3).train.owner.tolist()
    assert held.notes[0].startswith("the data of 2 sites are pooled and split among")


def test_the_draws_are_those_of_the_seed_by_whatever_name(
    place: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    points = {"atoll.populations": {"lots": "acme_kinds:by_lot", "iid": "acme_kinds:by_lot"}}
    install(tmp_path / "site", "acme-kinds", modules={"acme_kinds": KIND}, points=points)
    monkeypatch.syspath_prepend(tmp_path / "site")
    by_name = owners("lots", seed=7).train.owner.tolist()
    assert by_name == owners(f"{place}:by_lot", seed=7).train.owner.tolist()
    assert any(by_name != owners("lots", seed=seed).train.owner.tolist() for seed in range(5))
    with pytest.raises(ValueError, match=r"it is a built-in population, and the package acme-kinds 1\.2"):
        PopulationConfig(kind="iid", clients=2)


def test_test_data_follow_the_labels_of_the_training_data(place: str) -> None:
    splits = {"train": labelled([0, 1] * 10), "test": labelled([0] * 4 + [1] * 4)}
    task = task_of(lambda site, split: splits[split])
    held = populate(PopulationConfig(kind=f"{place}:by_label", clients=2), task, seed=0)
    assert held.test is not None
    assert held.test.owner.tolist() == [0] * 4 + [1] * 4


def test_targets_that_are_no_labels_are_dealt_where_the_function_needs_none(place: str) -> None:
    data = {"a": TensorDataset(torch.zeros(6, 1), torch.rand(6)), "b": TensorDataset(torch.zeros(2, 1), torch.rand(2))}
    held = owners(f"{place}:by_site", data=data)
    assert held.train.sizes.tolist() == [6, 2]
    with pytest.raises(ConfigError, match="by_label needs class labels"):
        owners(f"{place}:by_label", data=data)


def test_clients_without_examples_are_refused_or_left_out(place: str) -> None:
    with pytest.raises(ConfigError, match="the smallest client would have 0 examples, and min_examples is 1"):
        owners(f"{place}:first", 3)
    held = owners(f"{place}:first", 3, drop_empty=True)
    assert (held.task.sites, held.dropped) == (("c0000",), ("c0001", "c0002"))
    assert np.array_equal(held.train.sizes, [7])


@pytest.mark.parametrize(
    ("function", "fault"),
    [
        (
            "short",
            "gave list of shape (1,) and dtype int64; allowed: a whole number in 0..1 for each of the 7 examples",
        ),
        ("beyond", "gave numbers in 2..2; allowed: a whole number in 0..1"),
        ("broken", "raised KeyError: 'none'"),
        ("gone", "there is no gone in"),
    ],
)
def test_an_answer_that_is_no_split_is_refused(place: str, function: str, fault: str) -> None:
    with pytest.raises(ConfigError) as refusal:
        owners(f"{place}:{function}")
    assert fault in str(refusal.value)


@pytest.mark.parametrize(
    ("settings", "fault"),
    [
        ({"kind": "m:f"}, "m:f needs clients"),
        ({"kind": "m:f", "clients": 2, "alpha": 1.0}, r"alpha is not an option of m:f .allowed: clients, options"),
        ({"kind": "iid", "clients": 2, "options": {"x": 1}}, r"options is not an option of iid .allowed: clients"),
        ({"kind": "iit", "clients": 2}, 'allowed: "natural" | "iid" |'),
    ],
)
def test_settings_that_do_not_go_with_the_kind_are_refused(settings: dict[str, Any], fault: str) -> None:
    with pytest.raises(ValueError, match=fault.replace("|", r"\|")):
        PopulationConfig(**settings)
