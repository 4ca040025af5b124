"""The seed decides whatever a task draws, with any library's global generator, in a deployed run as in a simulation."""

import hashlib
import json
import random
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import nn
from torch.utils.data import TensorDataset, random_split

from atoll import Deadline, Instructions, Task, Trained
from atoll.simulations.engines.engine import Job, Training
from atoll.simulations.engines.engine import Trained as Simulated
from atoll.simulations.engines.sequential import Sequential
from atoll.task.arrays import Arrays
from atoll.task.randomness import data_of, seed_everything, seeded, training_seed
from atoll.training.model.parameters import initial_parameters
from atoll.training.worker.array_bench import ArrayBench
from atoll.training.worker.bench import Received
from atoll.training.worker.model_bench import ModelBench
from tests.training.tasks import make_task

DRAWS: dict[str, Callable[[int], Any]] = {
    "numpy": lambda n: np.random.randn(n),
    "random": lambda n: [random.gauss(0, 1) for _ in range(n)],
    "torch": lambda n: torch.randn(n).tolist(),
}


def drawn(draw: Callable[[int], Any], n: int) -> torch.Tensor:
    return torch.tensor(np.asarray(draw(n)), dtype=torch.float32)


def outcome(task: Task, site: str, *, seed: int = 3, model_seed: int = 5) -> Arrays:
    """Return the update of a new deployed worker of a site, whose process has drawn before."""
    np.random.rand(7), random.random(), torch.rand(3)
    bench = ModelBench(task, {"site": site})
    request = {"seed": seed, "model_seed": model_seed}
    return bench.train(Received(initial_parameters(task, 5)), request, Deadline.never()).trained.update


def check_same(one: Arrays, other: Arrays) -> None:
    assert one.keys() == other.keys()
    for name, array in one.items():
        np.testing.assert_array_equal(array, other[name], err_msg=name)


@pytest.mark.parametrize("library", DRAWS)
def test_a_starting_model_that_draws_is_decided_by_the_seed(library: str) -> None:
    class Drawn(nn.Linear):
        def __init__(self) -> None:
            super().__init__(6, 3)
            with torch.no_grad():
                self.weight.copy_(drawn(DRAWS[library], 18).view(3, 6))

    task = make_task(Drawn)
    first, again, other = (ModelBench(task, {}).initial(seed) for seed in (5, 5, 6))
    check_same(first, again)
    assert not np.array_equal(first["weight"], other["weight"])
    if library != "torch":  # nn.Linear has drawn from torch's before
        np.random.seed(5), random.seed(5)
        np.testing.assert_array_equal(first["weight"], drawn(DRAWS[library], 18).view(3, 6).numpy())


def test_generators_go_on_as_if_nothing_had_been_made() -> None:
    def after(make: Callable[[], Any]) -> tuple[float, float, float]:
        seed_everything(1)
        make()
        return random.random(), np.random.rand(), float(torch.rand(()))

    task = make_task(lambda: nn.Linear(6, 3))
    assert after(lambda: initial_parameters(task, 3)) == after(lambda: None)
    assert after(lambda: data_of(task, "a", "train")) == after(lambda: None)
    with pytest.raises(ZeroDivisionError), seeded(9):
        1 / 0  # noqa: B018 - the state is restored after a failure, too
    assert after(lambda: None) == after(lambda: None)


@pytest.mark.parametrize("library", DRAWS)
def test_fixed_features_that_do_not_travel_are_the_same_at_every_site_and_in_a_simulation(library: str) -> None:
    class Features(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.head = nn.Linear(6, 3)
            self.register_buffer("features", drawn(DRAWS[library], 36).view(6, 6), persistent=False)

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            y: torch.Tensor = self.head(x @ self.features)
            return y

    task = make_task(Features)
    update = outcome(task, "a")
    check_same(update, outcome(task, "a"))
    training = Training(task=task, model_seed=5)
    (simulated,) = Sequential(training).train(initial_parameters(task, 5), [Job("a", seed=3)])
    assert isinstance(simulated, Simulated)
    check_same(update, simulated.update)
    assert not np.array_equal(update["head.weight"], outcome(task, "a", model_seed=6)["head.weight"])


def test_a_random_split_of_common_data_puts_no_example_into_two_parts() -> None:
    examples = TensorDataset(torch.arange(60.0).view(60, 1), torch.zeros(60))
    sites = ["a", "b", "c"]

    def data(site: str, split: str) -> Any:
        of_site = random_split(examples, [20, 20, 20])[sites.index(site)]
        train, test = random_split(of_site, [15, 5])
        return train if split == "train" else test

    task = Task(model=lambda: nn.Linear(1, 1), data=data, sites=sites, loss=nn.functional.mse_loss)
    parts = []
    for site in sites:
        for split in ("train", "test"):
            torch.rand(3)
            parts += [int(row[0]) for row in data_of(task, site, split)]
    assert sorted(parts) == list(range(60))


class Sampled:
    """An array task whose library draws from numpy's global generator, as scikit-learn does without `random_state`."""

    sites = ("a",)

    def initial(self, seed: int) -> Arrays:
        return {"mean": np.random.rand(3).astype(np.float32)}

    def train(self, parameters: Arrays, instructions: Instructions) -> Trained:
        return Trained({"mean": np.random.rand(3).astype(np.float32)}, num_examples=1)

    def evaluate(self, parameters: Arrays, *, split: str, site: str | None) -> dict[str, Any]:
        return {"drawn": (random.random() + np.random.rand(), 1)}


def test_an_array_task_draws_from_the_seed_it_is_given() -> None:
    def results() -> tuple[Any, ...]:
        bench = ArrayBench(Sampled(), {"site": "a"})
        np.random.rand(2), random.random()
        version = bench.initial(4)
        trained = bench.train(Received(version), {"seed": 8}, Deadline.never()).trained.update["mean"]
        sums = bench.evaluate(Received(version), {"split": "test", "model_seed": 4})
        return version["mean"].tolist(), trained.tolist(), sums

    first = results()
    assert first == results()
    np.random.seed(4)
    assert first[0] == np.random.rand(3).astype(np.float32).tolist()
    np.random.seed(8)
    assert first[1] == np.random.rand(3).astype(np.float32).tolist()


def test_what_an_evaluation_draws_is_decided_by_the_seed() -> None:
    class Noisy(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.head = nn.Linear(6, 3)

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            y: torch.Tensor = self.head(x) + torch.randn(3) + float(np.random.rand())
            return y

    task = make_task(Noisy)
    version = Received(initial_parameters(task, 5))
    request = {"split": "server", "model_seed": 2}
    first = ModelBench(task, {}).evaluate(version, request)
    torch.rand(3), np.random.rand()
    assert first == ModelBench(task, {"site": "a"}).evaluate(version, request)
    assert first != ModelBench(task, {}).evaluate(version, request | {"model_seed": 3})


class Remembering(nn.Module):
    """A model that adds up its inputs in a buffer that does not travel, in place or by a new tensor."""

    def __init__(self, *, in_place: bool) -> None:
        super().__init__()
        self.head, self.in_place = nn.Linear(6, 3), in_place
        self.seen: torch.Tensor
        self.register_buffer("seen", torch.zeros(6), persistent=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        if self.training and self.in_place:
            self.seen += x.detach().mean(0)
        elif self.training:
            self.seen = self.seen + x.detach().mean(0)
        y: torch.Tensor = self.head(x - self.seen)
        return y


@pytest.mark.parametrize("in_place", [True, False])
def test_a_training_finds_no_state_that_an_earlier_one_has_left(in_place: bool) -> None:
    """A warm worker gives the update of a new one; in a simulation a client does not see what others have left."""
    task = make_task(lambda: Remembering(in_place=in_place))
    version = initial_parameters(task, 5)
    fresh = {site: outcome(task, site) for site in task.sites}
    warm = ModelBench(task, {"site": "b"})
    for _ in range(3):
        request = {"seed": 3, "model_seed": 5}
        check_same(fresh["b"], warm.train(Received(version), request, Deadline.never()).trained.update)
        warm.evaluate(Received(version), request | {"split": "test"})
    engine = Sequential(Training(task=task, model_seed=5))
    for _ in range(2):
        for result in engine.train(version, [Job(site, seed=3) for site in task.sites]):
            assert isinstance(result, Simulated)
            check_same(fresh[result.client_id], {name: array.copy() for name, array in result.update.items()})


def test_training_seed_depends_on_run_round_and_client_alone():
    seeds = {training_seed(s, r, n, c) for s in (1, 2) for r in ("x", "y") for n in (1, 2) for c in ("a", "b")}
    assert len(seeds) == 16
    assert all(0 <= seed < 2**63 for seed in seeds)
    assert training_seed(1, "x", 1, "a") == 6466808287774292255, "a client that trains again must get the same bits"


@given(st.integers(), st.text(), st.integers(1), st.text())
def test_training_seed_is_a_hash_of_json(seed: int, run: str, round_id: int, client: str):
    digest = hashlib.sha256(json.dumps([seed, run, round_id, client]).encode()).digest()
    assert training_seed(seed, run, round_id, client) == int.from_bytes(digest[:8], "little") >> 1
