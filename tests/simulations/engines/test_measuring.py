"""Evaluations by clients in every engine: the sums of a deployed client, to the bit, or rounded in one product."""

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn
from torch.utils.data import TensorDataset

from atoll.simulations.engines.batched.together import Together, together_if_possible
from atoll.simulations.engines.engine import ClientFailed, Engine, Job, Training
from atoll.simulations.engines.measuring import OneModel, windows_of
from atoll.simulations.engines.processes.processes import Processes
from atoll.simulations.engines.sequential import Sequential
from atoll.task.array_task import Instructions
from atoll.task.array_task import Trained as ArrayTrained
from atoll.task.metrics import Statistics
from atoll.training.worker.bench import Received
from atoll.training.worker.model_bench import ModelBench
from tests.simulations.engines.batched.test_hooks import Personal, training_of
from tests.simulations.engines.cases import (
    BATCHABLE,
    OTHERS,
    SIZES,
    Case,
    all_trained,
    deployed,
    first_version,
    jobs_of,
    mlp,
    one_by_one_task,
    vectors,
)

MODEL_SEED = 3


def at_a_client(training: Training, version: Mapping[str, Any], job: Job) -> Statistics | str:
    """Return the evaluation of a deployed client: the reference."""
    request = {
        "site": job.client_id,
        "split": "test",
        "local": dict(training.overrides),
        "algorithm": training.algorithm,
        "model_seed": training.model_seed,
        "version": job.version,
    }
    return ModelBench(training.task, request).evaluate(Received(dict(version), job.own), request)


def asked(own: Mapping[str, Any] | None = None) -> list[Job]:
    return [Job(site, MODEL_SEED, own=(own or {}).get(site), version=1) for site in SIZES]


def trained_states(case: Case, training: Training) -> tuple[dict[str, Any], dict[str, Any]]:
    """Return a version, and the tensors that stay at the clients after a round."""
    version = first_version(training)
    outcomes = {job.client_id: deployed(training, version, job) for job in jobs_of(case, 1, {})}
    for outcome in outcomes.values():
        for name, change in outcome.trained.update.items():
            version[name] = np.asarray(version[name] + change / len(outcomes), version[name].dtype)
    return version, {site: outcome.own for site, outcome in outcomes.items()}


@pytest.mark.parametrize("case", [*BATCHABLE, *OTHERS], ids=lambda case: case.name)
def test_the_sums_are_those_of_a_deployed_client(case: Case) -> None:
    training = replace(case.training(), model_seed=MODEL_SEED)
    version, own = trained_states(case, training)
    jobs = asked(own)
    right = [at_a_client(training, version, job) for job in jobs]
    assert Sequential(training).evaluate(version, jobs) == right
    together = together_if_possible(training)
    together.begin(version, 1)
    for found, expected in zip(together.measure(jobs), right, strict=True):
        assert close(found, expected)


def close(found: Statistics | str, expected: Statistics | str) -> bool:
    if isinstance(found, str) or isinstance(expected, str):
        return found == expected
    return list(found) == list(expected) and all(
        np.allclose(found[name], expected[name], rtol=1e-5, atol=1e-5) for name in found
    )


class Forwards(nn.Module):
    """A model that counts its forward passes in eval mode."""

    passes = 0

    def __init__(self) -> None:
        super().__init__()
        self.inner = mlp()

    def forward(self, inputs: torch.Tensor) -> torch.Tensor:
        if not self.training:
            Forwards.passes += 1
        return self.inner(inputs)


@pytest.fixture
def passes() -> Callable[[], int]:
    Forwards.passes = 0
    return lambda: Forwards.passes


def test_many_clients_share_a_forward_pass(passes: Callable[[], int]) -> None:
    training = Case("counted", model=Forwards).training()
    sites = [f"s{number}" for number in range(100)]
    sizes = {site: 1 + 37 * place % 700 for place, site in enumerate(sites)}  # some of three batches
    data = lambda site, split: TensorDataset(*vectors(sizes[site], sizes[site]))  # noqa: E731
    training = replace(training, task=replace(training.task, data=data, sites=sites))
    jobs = [Job(site, 0) for site in sites]
    measurer, version = Together(training), first_version(training)
    measurer.begin(version)
    found, num_passes = measurer.measure(jobs), passes()
    for sums, job in zip(found, jobs, strict=True):
        assert close(sums, at_a_client(training, version, job))
        assert not isinstance(sums, str)
        assert sums["loss"][1] == sizes[job.client_id]
    assert num_passes < 30  # of 100 clients; one after another 185 are needed


class Mixing(nn.Module):
    """A model whose examples influence each other, in eval mode too."""

    def __init__(self) -> None:
        super().__init__()
        self.inner = mlp()

    def forward(self, inputs: torch.Tensor) -> torch.Tensor:
        return self.inner(inputs - inputs.mean(dim=0))


class Drawing(nn.Module):
    """A model that draws in eval mode."""

    def __init__(self) -> None:
        super().__init__()
        self.inner = mlp()

    def forward(self, inputs: torch.Tensor) -> torch.Tensor:
        return self.inner(nn.functional.dropout(inputs, 0.5, training=True))


class Counting(nn.Module):
    """A model with a buffer that each pass changes, and that the next one reads."""

    def __init__(self) -> None:
        super().__init__()
        self.inner = mlp()
        self.register_buffer("seen", torch.zeros(()))

    def forward(self, inputs: torch.Tensor) -> torch.Tensor:
        self.seen += len(inputs)
        return self.inner(inputs) * self.seen


@pytest.mark.parametrize("model", [Mixing, Drawing, Counting])
def test_clients_that_measure_otherwise_together_are_measured_alone(model: Callable[[], nn.Module]) -> None:
    training = replace(Case("odd", model=model).training(), model_seed=MODEL_SEED)
    version, jobs = first_version(training), asked()
    right = [at_a_client(training, version, job) for job in jobs]
    measurer = Together(training)
    for _ in range(2):
        measurer.begin(version)
        assert measurer.measure(jobs) == right


def test_rows_that_are_read_one_by_one_and_sites_without_data() -> None:
    training = Case("mlp").training()
    whole = one_by_one_task(training.task).data
    task = replace(training.task, data=lambda site, split: None if site in "ac" else whole(site, split))
    training = replace(training, task=task)
    version, jobs = first_version(training), asked()
    right = [at_a_client(training, version, job) for job in jobs]
    assert right[0] == "this site has no such data"
    for measurer in (OneModel(training), Together(training)):
        measurer.begin(version)
        assert measurer.measure(jobs) == right


def test_the_loss_may_depend_on_the_site() -> None:
    def loss(outputs: torch.Tensor, targets: torch.Tensor, context: Any) -> torch.Tensor:
        return nn.functional.cross_entropy(outputs, targets) * context.settings["factor"]

    training = Case("mlp").training()
    tables = {"a": {"factor": 2.0}, "b": {"factor": 5.0}}
    task = replace(training.task, loss=loss, settings={"factor": 1.0}).with_site_settings(tables)
    training = replace(training, task=task)
    version, jobs = first_version(training), asked()
    plain = Sequential(Case("mlp").training()).evaluate(version, jobs)
    both = Sequential(training).evaluate(version, jobs), measured(together_if_possible(training), version, jobs)
    for found in both:
        for sums, base, job in zip(found, plain, jobs, strict=True):
            assert not isinstance(sums, str)
            assert not isinstance(base, str)
            factor = {"a": 2.0, "b": 5.0}.get(job.client_id, 1.0)
            assert sums["loss"][0] == pytest.approx(factor * base["loss"][0], rel=1e-6)


def measured(measurer: Any, version: Any, jobs: Sequence[Job]) -> list[Statistics | str]:
    measurer.begin(version, 1)
    found: list[Statistics | str] = measurer.measure(jobs)
    return found


class Evaluated(Personal):
    """A site evaluates its own model."""

    def evaluated(self, client: Any) -> Any:
        return client.state


def test_an_algorithm_of_the_tasks_own_says_what_a_site_evaluates() -> None:
    training = training_of(Evaluated())
    version = first_version(training)
    states = {
        each.client_id: {name: array.copy() for name, array in each.own.items()}
        for each in all_trained(Sequential(training).train(version, [Job(site, 1) for site in SIZES]))
    }
    jobs = asked(states)
    right = [at_a_client(training, version, job) for job in jobs]
    assert Sequential(training).evaluate(version, jobs) == right
    assert measured(together_if_possible(training), version, jobs) == right
    assert right != [at_a_client(training, version, job) for job in asked()]  # the states count


@contextmanager
def closing(engine: Engine) -> Iterator[Engine]:
    try:
        yield engine
    finally:
        engine.close()


class Measuring:
    """An ArrayTask whose sums are of the version, the site and the split; site c has no test data."""

    def initial(self, seed: int) -> dict[str, Any]:
        return {"w": np.zeros(2, np.float32)}

    def train(self, parameters: dict[str, Any], instructions: Instructions) -> ArrayTrained:
        return ArrayTrained({"w": np.ones(2, np.float32)}, 1)

    def evaluate(self, parameters: dict[str, Any], *, split: str, site: str | None) -> dict[str, Any] | None:
        assert split == "test"
        return None if site == "c" else {"loss": (float(parameters["w"].sum()) * ord(site or ""), 2.0)}


def test_a_task_in_arrays_measures_itself_in_every_engine() -> None:
    training, version = Training(task=Measuring()), {"w": np.array([0.5, 1.0], np.float32)}
    none = "the task has no data for 'test' here"
    expected = [none if site == "c" else {"loss": (1.5 * ord(site), 2.0)} for site in SIZES]
    engines: list[Callable[[], Engine]] = [
        lambda: Sequential(training),
        lambda: Processes(training, workers=1),
        lambda: Processes(training, workers=2),
    ]
    for make in engines:
        with closing(make()) as engine:
            for _ in range(2):
                assert engine.evaluate(version, asked()) == expected
                assert len(list(engine.train(version, asked()[:2]))) == 2


@pytest.mark.parametrize("is_batched", [False, True])
def test_processes_give_the_same_bits_for_any_number_of_workers(is_batched: bool) -> None:
    case = Case("mlp own head", local={"keep": "layers.1.*"}) if not is_batched else Case("mlp")
    training = case.training()
    version, own = trained_states(case, training)
    jobs = asked(own) * 9
    found = []
    for workers in (1, 2):
        with closing(Processes(training, workers=workers, batched=is_batched)) as engine:
            first = engine.evaluate(version, jobs)
            trained = all_trained(engine.train(version, jobs[:6]))  # in between, on the same connections
            assert len(trained) == 6
            assert engine.evaluate(version, jobs) == first
            found.append(first)
    assert found[0] == found[1]
    here = together_if_possible(training) if is_batched else OneModel(training)
    here.begin(version, 1)
    assert found[0] == [sums for window in windows_of(jobs) for sums in here.measure(window)]


def picky(outputs: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
    if len(targets) == SIZES["b"]:
        raise RuntimeError("no forty")
    return nn.functional.cross_entropy(outputs, targets)


def test_a_failure_of_the_tasks_code_names_the_client() -> None:
    training = Case("picky", loss=picky).training()
    version = first_version(training)
    message = r"the evaluation of client b failed:\nTraceback[\s\S]*no forty"
    with pytest.raises(ClientFailed, match=message):
        Sequential(training).evaluate(version, asked())
    with pytest.raises(ClientFailed, match=message):
        measured(Together(training), version, asked())
    with closing(Processes(training, workers=2)) as engine:
        with pytest.raises(ClientFailed, match=message):
            engine.evaluate(version, asked())
        assert len(engine.evaluate(version, asked()[:1])) == 1


def test_windows_do_not_depend_on_the_number_of_processes() -> None:
    jobs = [Job(str(number), 0) for number in range(1000)]
    assert [job for window in windows_of(jobs) for job in window] == jobs
    assert max(map(len, windows_of(jobs))) == 125
    assert list(map(len, windows_of(jobs[:3]))) == [1, 1, 1]
    assert windows_of([]) == []
