"""The examples learn: federated in this process, central, and one site of each in a real worker."""

from pathlib import Path
from typing import Any

import numpy as np
import pytest

from atoll import ArrayTask, Deadline, Instructions
from atoll.task import metrics
from atoll.task.arrays import Arrays
from atoll.task.task import Task, load_task
from atoll.tensors import safetensors_file
from atoll.training.local.training import evaluate, train_locally
from atoll.training.model.parameters import initial_parameters, load_parameters, update_of
from atoll.training.worker.bench import Received
from atoll.training.worker.model_bench import ModelBench
from atoll.training.worker.process import RunTerms, Worker
from tests.later import later

digits, iris_sklearn, central = later("examples.digits"), later("examples.iris_sklearn"), later("examples.central")

EXAMPLES = Path(__file__).parents[2] / "examples"


def mean(start: Arrays, outcomes: list[tuple[int, Arrays]]) -> Arrays:
    """The global model plus the weighted mean of the updates."""
    total = sum(num_examples for num_examples, _ in outcomes)
    return {name: start[name] + np.float32(sum(n * u[name] for n, u in outcomes) / total) for name in start}


def test_digits_belong_to_five_owners_and_the_server_and_to_nobody_twice() -> None:
    shares = digits.owners()
    assert sorted(np.concatenate(list(shares.values()))) == list(range(1797))
    assert len(shares["server"]) == len(digits.load_test()) == 355
    for site in digits.SITES:
        train, test = (len(digits.load_site(site, split)) for split in ("train", "test"))
        assert train + test == len(shares[site])
        assert train >= 100
        assert test >= 10


@pytest.mark.slow
def test_digits_are_learned_by_federated_averaging_in_ten_rounds() -> None:
    task = digits.task
    model, sites = task.model(), {site: task.data(site, "train") for site in task.sites}
    parameters = initial_parameters(task, 0)
    for round_id in range(10):
        outcomes = []
        for number, dataset in enumerate(sites.values()):
            load_parameters(model, parameters)
            work = train_locally(task, model, dataset, task.local, seed=1000 * round_id + number)
            outcomes.append((work.num_examples, update_of(parameters, model)))
        parameters = mean(parameters, outcomes)
    load_parameters(model, parameters)
    accuracy = metrics.values(task.metrics, evaluate(task, model, digits.load_test()))["accuracy"]
    assert accuracy is not None
    assert accuracy > 0.93


@pytest.mark.slow
def test_digits_are_learned_centrally() -> None:
    assert central.train_centrally(digits.task, epochs=6, seed=0) > 0.95


@pytest.mark.slow
def test_iris_is_learned_by_federated_averaging_without_torch() -> None:
    task = iris_sklearn.task
    assert isinstance(task, ArrayTask)
    parameters = task.initial(0)
    for round_id in range(1, 9):
        outcomes = []
        for number, site in enumerate(task.sites):
            trained = task.train(parameters, Instructions(site, 10 * round_id + number, round_id, Deadline.never()))
            outcomes.append((trained.num_examples, trained.update))
        parameters = mean(parameters, outcomes)
    statistics = task.evaluate(parameters, split="server", site=None)
    assert statistics is not None
    assert metrics.values({}, statistics)["accuracy"] == 1.0
    assert statistics["accuracy"][1] == 30


def test_iris_hands_in_what_it_has_when_the_time_is_over() -> None:
    deadline = Deadline.never()
    deadline.stop()
    trained = iris_sklearn.task.train(iris_sklearn.task.initial(0), Instructions("hill", 1, 1, deadline))
    assert trained.work == 0.2


@pytest.mark.real
@pytest.mark.parametrize("delay_s", ["0", "0.2"])
def test_digits_train_in_a_worker_and_a_slow_disk_makes_a_straggler(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, delay_s: str
) -> None:
    monkeypatch.setenv("ATOLL_DEMO_SLOW_S", delay_s)
    reference = f"{EXAMPLES}/digits.py:task"
    worker = Worker(reference, site="north", log_path=tmp_path / "log", threads=1, run=RunTerms({"epochs": 1}))
    paths = {"model": str(tmp_path / "version"), "out": str(tmp_path / "update")}
    try:
        described = worker.call("describe", 60)
        assert described["num_examples"] == 186
        assert sum(int(np.prod(shape)) for _, _, shape in described["layout"]) == 283_786
        worker.call("initial", 60, seed=1, out=paths["model"])
        pid, updates = worker.pid, []
        for _ in range(2):
            budget_s = 60.0 if delay_s == "0" else 1.0
            trained = worker.call("train", 90, seed=5, round_id=1, budget_s=budget_s, lease_s=30.0, **paths)
            updates.append(safetensors_file.read(tmp_path / "update"))
        evaluated: dict[str, Any] = worker.call("evaluate", 60, model=paths["model"], split="server")
        assert worker.pid == pid
    finally:
        worker.close()
    assert trained["num_examples"] == 186
    assert evaluated["statistics"]["accuracy"][1] == 355
    if delay_s == "0":
        assert (trained["work"], trained["steps"]) == (1.0, 12)
        assert all(np.array_equal(updates[0][name], updates[1][name]) for name in updates[0])
    else:
        assert 1 <= trained["steps"] <= 5
        assert trained["work"] == trained["steps"] / 12


@pytest.mark.slow
@pytest.mark.parametrize(("keep", "low", "high"), [("batchnorm", 0.55, 1.0), (None, 0.0, 0.45)])
def test_scanners_that_differ_are_learned_by_those_who_keep_their_batch_norms(
    keep: str | None, low: float, high: float
) -> None:
    task, local = load_task(f"{EXAMPLES}/scanners.py:task"), {"keep": keep}
    assert isinstance(task, Task)
    benches = {site: ModelBench(task, {"site": site, "local": local}) for site in task.sites}
    parameters, own = ModelBench(task, {"local": local}).initial(0), dict[str, Arrays]()
    for seed in range(6):
        outcomes = {
            site: bench.train(Received(parameters, own.get(site)), {"seed": seed}, Deadline.never())
            for site, bench in benches.items()
        }
        own = {site: outcome.own for site, outcome in outcomes.items()}
        moved = mean(parameters, [(o.trained.num_examples, o.trained.update) for o in outcomes.values()])
        parameters = {name: np.asarray(array, parameters[name].dtype) for name, array in moved.items()}
    sums = [bench.evaluate(Received(parameters, own[site]), {"split": "test"}) for site, bench in benches.items()]
    accuracy = metrics.values(task.metrics, metrics.merge(one for one in sums if not isinstance(one, str)))["accuracy"]
    assert accuracy is not None
    assert low < accuracy < high
