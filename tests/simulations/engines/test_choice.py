import math
import re
from collections import OrderedDict
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from itertools import count
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn

from atoll.simulations.engines.choice import MESSAGES_S, SHARE_OF_PROCESSES, Choice, Resources, _jobs, choose
from atoll.simulations.engines.determinism import NotDeterministic, check_deterministic, check_model
from atoll.simulations.engines.engine import ClientFailed, Job, Trained, Training
from atoll.simulations.engines.sequential import Sequential
from tests.simulations.engines.cases import (
    SIZES,
    Case,
    all_trained,
    dropout_mlp,
    first_version,
    mlp,
    noisy_mlp,
    one_by_one_task,
    vectors,
)

SITES = list(SIZES)


@contextmanager
def chosen(training: Training, workers: int | None = None, **others: Any) -> Iterator[Choice]:
    choice = choose(training, first_version(training), SITES, resources=Resources(workers), **others)
    try:
        yield choice
    finally:
        choice.engine.close()


@pytest.mark.real
def test_the_fastest_of_all_is_taken_and_every_figure_told() -> None:
    training = Case("mlp").training()
    with chosen(training, workers=2) as choice:
        names = [figure.engine for figure in choice.figures]
        assert sorted(names) == ["2 processes", "batched (k=128)", "batched (k=128), 2 processes", "sequential"]
        speeds = {figure.engine: figure.clients_per_s for figure in choice.figures}
        assert list(speeds.values()) == sorted(speeds.values(), reverse=True)
        shares = {name: SHARE_OF_PROCESSES if "processes" in name else 1.0 for name in speeds}
        in_a_run = {name: shares[name] / (1 / speed + MESSAGES_S) for name, speed in speeds.items()}
        assert choice.engine.name == max(in_a_run, key=lambda name: in_a_run[name])
        assert str(choice).startswith(f"engine: {choice.engine.name} (clients/s: {names[0]} ")
        assert len(all_trained(choice.engine.train(first_version(training), [Job("a", 1)]))) == 1


def test_a_short_run_starts_and_measures_no_further_process() -> None:
    training = Case("mlp").training()
    with chosen(training, workers=2, trainings=3) as choice:
        assert sorted(figure.engine for figure in choice.figures) == ["batched (k=128)", "sequential"]
        assert "processes" not in choice.engine.name


@pytest.mark.parametrize(
    ("in_product", "elsewhere", "expected"), [(1e-6, 1.0, "batched (k=128)"), (1.0, 1e-6, "sequential")]
)
def test_a_clock_decides_and_nothing_else(in_product: float, elsewhere: float, expected: str) -> None:
    """The clock advances only in the loss, and at another rate in a product of many clients."""
    instants = [0.0]

    def loss(outputs: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
        instants[0] += in_product if torch._C._functorch.is_batchedtensor(outputs) else elsewhere
        return nn.functional.cross_entropy(outputs, targets)

    training = replace(Case("mlp").training(), task=replace(Case("mlp").task(), loss=loss))
    with chosen(training, workers=1, clocks=(lambda: instants[0], lambda: instants[0])) as choice:
        assert choice.engine.name == expected


def test_other_work_on_the_machine_does_not_decide_between_two_engines_of_one_process() -> None:
    """The real time stands still in the sequential engine, and runs in a product; the processor time does otherwise."""
    real, processor = [0.0], [0.0]

    def loss(outputs: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
        is_product = torch._C._functorch.is_batchedtensor(outputs)
        real[0] += 1.0 if is_product else 1e-6
        processor[0] += 1e-6 if is_product else 1.0
        return nn.functional.cross_entropy(outputs, targets)

    training = replace(Case("mlp").training(), task=replace(Case("mlp").task(), loss=loss))
    with chosen(training, workers=1, clocks=(lambda: real[0], lambda: processor[0])) as choice:
        assert choice.engine.name == "batched (k=128)"


@pytest.mark.parametrize(
    ("case", "reason"),
    [
        (Case("noisy", model=noisy_mlp), r"not batched: by hand: .*; stacked: the task draws random numbers in a step"),
        (
            Case("synchronous", model=lambda: nn.Sequential(nn.Linear(6, 3), nn.SyncBatchNorm(3))),
            r"not batched: 1 \(SyncBatchNorm\) mixes the examples of a batch",
        ),
    ],
)
def test_what_cannot_be_batched_falls_back_with_the_reason(case: Case, reason: str) -> None:
    with chosen(case.training(), name="batched", workers=1) as choice:
        assert choice.engine.name == "sequential"
        (told,) = choice.reasons
        assert re.match(reason, told)
        assert told in str(choice)


@pytest.mark.slow
def test_a_client_that_fills_the_cache_is_measured_in_products_of_one() -> None:
    def model() -> nn.Module:
        return nn.Sequential(nn.Identity(), nn.Linear(6, 150_000), nn.ReLU(), nn.Linear(150_000, 3))

    with chosen(Case("wide", model=model).training(), workers=1) as choice:
        assert {figure.engine for figure in choice.figures} == {"sequential", "batched (k=1)"}
        assert choice.reasons == ()


@pytest.mark.real
def test_an_engine_that_cannot_start_is_left_out_with_the_reason(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("atoll.simulations.engines.processes.processes._can_fork", lambda _: False)
    with chosen(Case("noisy", model=lambda: noisy_mlp()).training(), workers=2) as choice:
        assert choice.engine.name == "sequential"
        assert [figure.engine for figure in choice.figures] == ["sequential"]
        assert choice.reasons[0].startswith("not batched: ")
        assert choice.reasons[1].startswith("not 2 processes: the task cannot be sent to another process")


def test_what_fails_in_the_tasks_code_is_no_reason_to_leave_an_engine_out() -> None:
    def loss(outputs: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
        raise RuntimeError("no loss today")

    training = replace(Case("mlp").training(), task=replace(Case("mlp").task(), loss=loss))
    with pytest.raises(ClientFailed, match="no loss today"):
        choose(training, first_version(training), SITES, resources=Resources(2))


def test_a_name_that_is_no_engine_is_refused() -> None:
    training = Case("mlp").training()
    message = "engine must be one of auto, sequential, processes, batched, ray, got 'fast'"
    with pytest.raises(ValueError, match=message):
        choose(training, first_version(training), SITES, name="fast")


def test_by_hand_means_by_hand() -> None:
    training = Case("mlp").training()
    expected = {"sequential": "sequential", "processes": "3 processes", "batched": "batched (k=128), 3 processes"}
    for name, told in expected.items():
        with chosen(training, name=name, workers=3) as choice:
            assert choice.engine.name == told


def test_a_task_that_keeps_its_seeds_passes() -> None:
    training = Case("dropout", model=dropout_mlp).training()
    check_model(training)
    check_deterministic(lambda: Sequential(training), first_version(training), SITES)
    training = replace(training, task=one_by_one_task(Case("dropout", model=dropout_mlp).task()))
    check_deterministic(lambda: Sequential(training), first_version(training), SITES)


def test_a_task_with_a_generator_of_its_own_is_told_where_it_differs() -> None:
    generator = torch.Generator().manual_seed(1)

    def loss(outputs: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
        noise = torch.rand(outputs.shape, generator=generator)
        return nn.functional.cross_entropy(outputs + noise, targets)

    training = replace(Case("mlp").training(), task=replace(Case("mlp").task(), loss=loss))
    version = first_version(training)
    with pytest.raises(NotDeterministic, match=r"two trainings of client a with the same seed differ in layers\.0"):
        check_deterministic(lambda: Sequential(training), version, SITES)


def test_a_model_that_begins_elsewhere_each_time_is_found() -> None:
    generator = np.random.default_rng(3)

    def model() -> nn.Module:
        made = mlp()
        with torch.no_grad():
            next(made.parameters()).add_(float(generator.standard_normal()))
        return made

    with pytest.raises(NotDeterministic, match=r"the model made twice from the same seed differs in layers\.0"):
        check_model(Case("elsewhere", model=model).training())


def test_data_that_are_others_each_time_are_found() -> None:
    generator = torch.Generator().manual_seed(3)
    case = Case("others", examples=lambda count, seed: vectors(count, int(torch.randint(99, (), generator=generator))))
    training = case.training()
    with pytest.raises(NotDeterministic, match="the update of client a changes when its data are read again"):
        check_deterministic(lambda: Sequential(training), first_version(training), SITES)


def widths(*several: int) -> Case:
    """Return a case whose model has another width each time it is built, and the last one from then on."""
    left = list(several)

    def model() -> nn.Module:
        width = left.pop(0) if len(left) > 1 else left[0]
        return nn.Sequential(nn.Linear(6, width), nn.Linear(width, 3))

    return Case("widths", model=model)


def test_a_model_of_another_shape_or_with_other_names_each_time_is_found() -> None:
    with pytest.raises(NotDeterministic, match=r"differs in the shape of 0\.weight, \(4, 6\) and \(5, 6\)"):
        check_model(widths(4, 5).training())
    names = iter(["one", "other"])

    def model() -> nn.Module:
        return nn.Sequential(OrderedDict([(next(names), nn.Linear(6, 3))]))

    with pytest.raises(NotDeterministic, match=r"differs in whether it has one\.weight"):
        check_model(Case("names", model=model).training())


@pytest.mark.parametrize("bad", [1, 3])
def test_a_client_that_leaves_the_finite_numbers_once_only_is_found(bad: int) -> None:
    calls = count(1)

    def loss(outputs: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
        return nn.functional.cross_entropy(outputs, targets) * (math.nan if next(calls) == bad else 1.0)

    training = replace(Case("nan", local={"batch_size": 100}).training(), task=replace(Case("nan").task(), loss=loss))
    with pytest.raises(NotDeterministic, match=r"client a .* differ in whether it diverges to NaN or infinity"):
        check_deterministic(lambda: Sequential(training), first_version(training), SITES)


def test_what_stays_at_a_client_must_be_the_same_too() -> None:
    noise = count(1)

    def model() -> nn.Module:
        made = nn.Sequential(nn.Linear(6, 8), nn.Linear(8, 3))
        made[0].weight.register_hook(lambda gradient: gradient * next(noise))
        return made

    training = Case("own", model=model, local={"keep": "0.*", "batch_size": 100}).training()
    with pytest.raises(NotDeterministic, match=r"differ in 0\.weight \(local state\) by up to"):
        check_deterministic(lambda: Sequential(training), first_version(training), SITES)


def test_examples_that_see_each_other_are_found_by_trying() -> None:
    class Centered(nn.Module):
        """A model that subtracts the mean of its batch, which differs with several clients in the batch."""

        def __init__(self) -> None:
            super().__init__()
            self.layer = nn.Linear(6, 3)

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            y: torch.Tensor = self.layer(x - x.mean(0))
            return y

    case = Case("centered", model=Centered)
    with chosen(case.training(), name="batched", workers=1) as choice:
        version = first_version(case.training())
        jobs = [Job("a", 1), Job("b", 2)]
        reference = all_trained(Sequential(case.training()).train(version, jobs))
        for found, expected in zip(choice.engine.train(version, jobs), reference, strict=True):
            assert isinstance(found, Trained)
            np.testing.assert_allclose(found.row, expected.row, rtol=1e-4, atol=1e-6)


@pytest.mark.parametrize(
    ("of_client", "of_step", "together", "expected"),
    [
        (2e-3, 2e-4, 24, (48, 6)),  # 2NN on two processes: a client takes 3.2 ms, whatever its first step seems to take
        (1e-5, 1e-5, 24, (100, 6)),
        (0.0, 1e-2, 1, (2, 5)),
        (0.0, 1e-2, 6, (6, 3)),  # longer than a tenth of a second, so that most of it is steps
        (0.0, 1e-2, 24, (24, 3)),  # no time for so many, but with fewer the second worker would have nothing to do
        (0.0, 1.0, 256, (100, 1)),
    ],
)
def test_no_worker_is_without_a_product_while_engines_are_measured(
    of_client: float, of_step: float, together: int, expected: tuple[int, int]
) -> None:
    instants = [0.0]

    class Timed:
        name = "timed"

        def train(self, version: Any, jobs: Any) -> Iterator[Any]:
            for job in jobs:
                steps = min(job.steps or 6, 6)
                instants[0] += of_client + steps * of_step
                yield Trained(job.client_id, {}, 60, steps / 6, {}, {}, {})

        def close(self) -> None:
            pass

    jobs = _jobs(Timed(), {}, [str(k) for k in range(100)], lambda: instants[0], together=together)
    assert (len(jobs), jobs[0].steps) == expected
