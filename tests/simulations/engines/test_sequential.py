from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn

from atoll import Local, Task
from atoll.simulations.engines.engine import ClientFailed, Failed, Job, Trained, Training
from atoll.simulations.engines.sequential import Sequential
from atoll.task.array_task import Instructions
from atoll.task.array_task import Trained as ArrayTrained
from atoll.task.errors import TaskBroken, TaskMismatch
from tests.simulations.engines.cases import (
    BATCHABLE,
    OTHERS,
    SIZES,
    Case,
    all_trained,
    assert_same_bits,
    first_version,
    mlp,
    one_by_one_task,
    subset_task,
    two_rounds,
)


def check(case: Case, training: Training) -> None:
    engine = Sequential(training)
    pairs = list(two_rounds(case, lambda version, jobs: all_trained(engine.train(version, jobs)), training))
    assert len(pairs) == 10
    for found, expected in pairs:
        assert_same_bits(found, expected)


@pytest.mark.parametrize("case", [*BATCHABLE, *OTHERS], ids=lambda case: case.name)
def test_every_bit_is_that_of_a_deployed_client(case: Case) -> None:
    check(case, case.training())


@pytest.mark.parametrize("changed", [subset_task, one_by_one_task])
def test_examples_that_are_no_plain_tensors_too(changed: Any) -> None:
    case = Case("mlp", local={"epochs": 2})
    check(case, replace(case.training(), task=changed(case.task())))


@pytest.mark.parametrize("case", [case for case in BATCHABLE if case.units is not None], ids=lambda case: case.name)
def test_a_weight_is_the_units_of_the_clients_data(case: Case) -> None:
    """The right number is counted over the whole data set of the client; a training that is cut short estimates it."""
    training = case.training()
    found = all_trained(Sequential(training).train(first_version(training), [Job(site, 0) for site in SIZES]))
    for trained in found:
        _, targets = case.examples(SIZES[trained.client_id], SIZES[trained.client_id])
        right = SIZES[trained.client_id] if case.units == "sum" else float(case.units(targets))
        assert trained.num_examples == pytest.approx(right, rel=1e-6)
        total, count = trained.statistics["loss"]
        assert count == pytest.approx(
            (right if case.units == "sum" else float(case.units(targets))) * case.local.get("epochs", 1), rel=1e-6
        )
        assert total > 0


def test_a_training_of_the_tasks_own_is_called_as_it_is_deployed() -> None:
    def fit(model: nn.Module, data: Any, local: Local, deadline: Any) -> float:
        with torch.no_grad():
            for parameter in model.parameters():
                parameter.add_(torch.randn(parameter.shape), alpha=local.lr)
        return 0.5

    case = Case("fit")
    check(case, replace(case.training(), task=replace(case.task(), fit=fit)))


def test_flags_that_a_loop_leaves_in_the_process_do_not_reach_the_next_client() -> None:
    seen = []

    def fit(model: nn.Module, data: Any, local: Local, deadline: Any) -> float:
        seen.append((torch.is_grad_enabled(), torch.get_default_dtype()))
        torch.set_grad_enabled(False)
        torch.set_default_dtype(torch.float64)
        return 1.0

    case = Case("fit")
    engine = Sequential(replace(case.training(), task=replace(case.task(), fit=fit)))
    all_trained(engine.train(first_version(case.training()), [Job(site, 0) for site in SIZES]))
    assert seen == [(True, torch.float32)] * len(SIZES)
    assert (torch.is_grad_enabled(), torch.get_default_dtype()) == (True, torch.float32)


class Counting:
    """An ArrayTask whose update has the values of the request."""

    def initial(self, seed: int) -> dict[str, Any]:
        return {"w": np.zeros(2, np.float32)}

    def train(self, parameters: dict[str, Any], instructions: Instructions) -> ArrayTrained:
        asked = [instructions.round_id, instructions.seed + parameters["w"][0]]
        return ArrayTrained({"w": np.array(asked, np.float32)}, len(instructions.site), {"loss": (1, 2)})


def test_a_task_in_arrays_is_asked_with_its_instructions() -> None:
    engine = Sequential(Training(task=Counting()))
    (found,) = engine.train({"w": np.ones(2, np.float32)}, [Job("abc", seed=6, round_id=4)])
    assert isinstance(found, Trained)
    np.testing.assert_array_equal(found.update["w"], [4, 7])
    assert (found.num_examples, found.statistics) == (3, {"loss": (1.0, 2.0)})


def test_updates_are_views_of_rows_in_the_order_of_a_versions_file() -> None:
    training = Case("mlp").training()
    version = first_version(training)
    found = list(Sequential(training).train(version, [Job("a", 1), Job("b", 2)]))
    for trained in found:
        assert isinstance(trained, Trained)
        assert trained.row is not None
        np.testing.assert_array_equal(trained.row, np.concatenate([trained.update[n].ravel() for n in sorted(version)]))
        assert all(np.shares_memory(trained.row, array) for array in trained.update.values())


def test_one_clients_bits_depend_on_nobody_before_it() -> None:
    training = Case("mlp momentum", local={"momentum": 0.9, "prox_mu": 0.1}).training()
    version = first_version(training)
    jobs = [Job(site, seed) for seed, site in enumerate("abcd")]
    engine = Sequential(training)
    forwards = {t.client_id: t for t in all_trained(engine.train(version, jobs))}
    for backwards in all_trained(engine.train(version, jobs[::-1])):
        for name, array in backwards.update.items():
            np.testing.assert_array_equal(array, forwards[backwards.client_id].update[name])


def test_a_client_that_leaves_the_finite_numbers_fails_alone() -> None:
    training = Case("mlp", local={"lr": 1e30, "epochs": 3}).training()
    results = list(Sequential(training).train(first_version(training), [Job("b", 1), Job("c", 1, steps=1)]))
    assert isinstance(results[0], Failed)
    assert results[0].kind == "not_finite"
    assert "layers.0.0.weight" in results[0].detail
    assert isinstance(results[1], Trained)


def test_what_fails_in_the_tasks_code_names_the_client_and_the_line() -> None:
    def loss(outputs: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
        raise RuntimeError("no loss today")

    training = replace(Case("mlp").training(), task=replace(Case("mlp").task(), loss=loss))
    with pytest.raises(ClientFailed, match=r"client b failed:\nTraceback[\s\S]*no loss today"):
        list(Sequential(training).train(first_version(training), [Job("b", 1)]))


def test_a_loss_in_a_vector_of_one_is_that_number() -> None:
    case = Case("vector", loss=lambda outputs, targets: nn.functional.cross_entropy(outputs, targets).reshape(1))
    check(case, replace(case.training(), task=replace(case.task(), metrics={})))


def test_a_client_without_examples_is_said_so() -> None:
    task = replace(Case("mlp").task(), data=lambda site, split: None)
    training = Training(task=task)
    with pytest.raises(ClientFailed, match=r"task.data\('a', 'train'\) gave no examples"):
        list(Sequential(training).train(first_version(training), [Job("a", 1)]))


def test_a_version_of_another_model_is_refused() -> None:
    training = Case("mlp").training()
    wrong = first_version(training) | {"layers.1.0.bias": np.zeros(4, np.float32)}
    with pytest.raises(TaskMismatch, match=r"layers.1.0.bias is F32 \(4,\), expected F32 \(3,\)"):
        list(Sequential(training).train(wrong, [Job("a", 1)]))


def test_what_cannot_go_together_is_refused_at_the_start() -> None:
    with pytest.raises(TaskBroken, match=r"scaffold.*momentum"):
        Case("mlp", local={"momentum": 0.9}, algorithm="scaffold").training()
    with pytest.raises(ValueError, match=r"local\.rate: unknown key"):
        Case("mlp", local={"rate": 0.9}).training()
    with pytest.raises(ValueError, match="at least one step, got 0 for a"):
        Job("a", seed=1, steps=0)


def test_the_number_of_threads_outside_stays_as_it_was() -> None:
    before = torch.get_num_threads()
    seen = []

    def model() -> nn.Module:
        net = mlp()
        net.register_forward_pre_hook(lambda *_: seen.append(torch.get_num_threads()))
        return net

    training = replace(Case("mlp").training(), task=replace(Case("mlp").task(), model=model))
    version = first_version(training)
    torch.set_num_threads(2)
    try:
        for _ in Sequential(training, threads=1).train(version, [Job("c", 1)]):
            assert torch.get_num_threads() == 2
        assert seen == [1]
    finally:
        torch.set_num_threads(before)


def test_a_task_whose_buffers_are_replaced_still_sends_them() -> None:
    class Counter(nn.Module):
        count: torch.Tensor

        def __init__(self) -> None:
            super().__init__()
            self.layer = nn.Linear(6, 3)
            self.register_buffer("count", torch.zeros(()))

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            self.count = self.count + 1  # another tensor each time
            return self.layer(x)  # type: ignore[no-any-return]

    case = Case("counter", model=Counter)
    check(case, case.training())


def test_a_task_is_needed_for_local_settings() -> None:
    with pytest.raises(TaskBroken, match="an ArrayTask has no Local"):
        _ = Training(task=Counting()).local
    assert isinstance(Case("mlp").task(), Task)
