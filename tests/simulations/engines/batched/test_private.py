"""Private steps of many clients at once: the samples and the noise of each alone, and the same updates to rounding."""

import re
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn

from atoll.simulations.engines.batched.batched import Batched, trainer_of
from atoll.simulations.engines.batched.private_sums import BY_ROW, CAPTURED
from atoll.simulations.engines.batched.private_trainer import PrivateSchedule
from atoll.simulations.engines.batched.stack import CannotBatch
from atoll.simulations.engines.choice import Resources, choose
from atoll.simulations.engines.engine import ClientFailed, Job
from atoll.simulations.engines.examples import ExamplesOf
from atoll.simulations.engines.sequential import Sequential
from atoll.training.private.local_steps import PrivateSteps, PrivateTerms, training_key
from atoll.training.private.noise import add_noise, add_noise_of_each
from tests.simulations.engines.cases import (
    IMAGES,
    SIZES,
    WORDS,
    Case,
    all_trained,
    batchnorm_cnn,
    decoder,
    dropout_mlp,
    first_version,
    frozen_mlp,
    groupnorm_cnn,
    mlp,
    num_padded,
    padded_loss,
    sentences,
    subset_task,
    two_rounds,
)

TERMS: dict[str, Any] = {
    "privacy.unit": "example",
    "privacy.sample_rate": 0.15,
    "privacy.clip_norm": 0.5,
    "privacy.noise_multiplier": 0.7,
    "privacy.delta": 1e-3,
}
"""A third of the samples of the small clients are empty."""
SHARED: dict[str, Any] = {"privacy.noise_by": "clients", "privacy.batch": 6.0, "privacy.bits": 32}
"""Terms of a step whose noise the clients add in their secure sum."""


def private(case: Case, **local: Any) -> Case:
    return replace(case, local={**TERMS, **case.local, **local})


CASES = [
    Case("mlp"),
    Case("mlp momentum decay", local={"momentum": 0.9, "weight_decay": 0.01, "epochs": 2}),
    Case("mlp adamw", local={"optimizer": "adamw", "lr": 0.01, "weight_decay": 0.1}),
    Case("mlp fedprox", local={"prox_mu": 0.5, "clip_norm": 0.5}),
    Case("mlp stopped early", steps=2),
    Case("mlp own head", local={"keep": "layers.1.*"}),
    Case("mlp shared noise", local={**SHARED, "optimizer": "adamw", "lr": 0.3, "epochs": 2}),
    Case("cnn shared noise", model=groupnorm_cnn, **{**IMAGES, "local": {**SHARED, "privacy.clip_norm": 0.1}}),
    Case("frozen mlp", model=frozen_mlp, travels="trained"),
    Case("groupnorm cnn", model=groupnorm_cnn, **IMAGES),
    Case("decoder", local={"max_steps": 3}, **WORDS),
    Case(
        "decoder padded", model=decoder, examples=sentences, loss=padded_loss, units=num_padded, local={"max_steps": 2}
    ),
]


@pytest.mark.parametrize("case", [pytest.param(private(case), id=case.name) for case in CASES])
def test_it_agrees_with_a_deployed_client(case: Case) -> None:
    training = case.training()
    engine = Batched(training, at_once=3)
    assert engine.kind == CAPTURED
    for found, expected in two_rounds(case, lambda version, jobs: all_trained(engine.train(version, jobs)), training):
        for ours, theirs in ((found.update, expected.trained.update), (found.own, expected.own)):
            assert ours.keys() == theirs.keys()
            for name, array in theirs.items():
                np.testing.assert_allclose(ours[name], array, rtol=1e-5, atol=1e-6, err_msg=name)
        assert (found.statistics, found.report) == ({}, expected.report)
        assert (found.num_examples, found.work) == (expected.trained.num_examples, expected.trained.work)


def test_each_client_has_the_samples_that_it_has_alone() -> None:
    """Of subsets of one data set, of several data sets, and of clients that stop earlier."""
    terms = PrivateTerms.read({name.removeprefix("privacy."): value for name, value in TERMS.items()})
    assert terms is not None
    for task in (Case("mlp").task(), subset_task(Case("mlp").task())):
        examples = [ExamplesOf(task, "cpu")(site) for site in SIZES]
        offsets = [0] * len(SIZES) if examples[0].chosen is not None else [1000 * n for n in range(len(SIZES))]
        jobs = [Job(site, seed=7 + n, steps=2 if n == 1 else None) for n, site in enumerate(SIZES)]
        schedule = PrivateSchedule(jobs, examples, terms, terms.steps_of(task.local), offsets)
        assert schedule.order[-1] == 1
        found: dict[int, list[list[int]]] = {index: [] for index in range(len(SIZES))}
        for batch in schedule:
            for index, rows, size in zip(schedule.order, batch.rows, batch.sizes, strict=False):
                found[index].append((rows[:size] - offsets[index]).tolist())
        assert [] in found[2]
        for index, (job, each) in enumerate(zip(jobs, examples, strict=True)):
            data = task.data(job.client_id, "train")
            alone = PrivateSteps(
                terms, task, mlp().train(), data, task.local, key=training_key({"seed": job.seed}), seed=job.seed
            )
            wanted = [each.rows(positions).tolist() for _, positions in alone.batches()]
            assert found[index] == wanted[: job.steps]


def test_each_client_has_the_noise_that_it_has_alone_bit_for_bit() -> None:
    keys, names = [bytes([n]) * 32 for n in range(5)], {"w": (7, 9), "b": (3,), "s": (), "large": (65_537,)}
    values = {name: torch.randn(5, *shape, dtype=torch.float64) for name, shape in names.items()}
    together = {name: each.clone() for name, each in values.items()}
    add_noise_of_each(together, keys, 4, 0.3)
    for row, key in enumerate(keys):
        alone = {name: each[row].clone() for name, each in values.items()}
        add_noise(alone, key, 4, 0.3)
        assert all(torch.equal(alone[name], together[name][row]) for name in names)


def test_samples_without_any_row_step_on_noise_alone() -> None:
    case = private(Case("mlp"), **{"privacy.sample_rate": 1e-9, "max_steps": 2})
    training = case.training()
    version, jobs = first_version(training), [Job(site, seed=5) for site in SIZES]
    together, alone = (all_trained(e.train(version, jobs)) for e in (Batched(training), Sequential(training)))
    for one, other in zip(together, alone, strict=True):
        assert all(np.array_equal(one.update[name], other.update[name]) for name in other.update)
        assert any(np.abs(array).max() > 0 for array in one.update.values())


class Recurrent(nn.Module):
    """A recurrent layer, whose example gradients are mapped row by row."""

    def __init__(self) -> None:
        super().__init__()
        self.layer, self.out = nn.LSTM(8, 4, batch_first=True), nn.Linear(4, 3)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        found: torch.Tensor = self.out(self.layer(x[:, 0])[0][:, -1])
        return found


@pytest.mark.filterwarnings("ignore:.*batching rule.*:UserWarning")
def test_layers_that_are_not_captured_are_mapped_by_row() -> None:
    case = private(Case("lstm", model=Recurrent, **IMAGES), max_steps=2)
    training = case.training()
    assert trainer_of(training, at_once=3).kind == BY_ROW
    version, jobs = first_version(training), [Job(site, seed=5) for site in SIZES]
    together, alone = (all_trained(e.train(version, jobs)) for e in (Batched(training), Sequential(training)))
    for one, other in zip(together, alone, strict=True):
        for name, array in other.update.items():
            np.testing.assert_allclose(one.update[name], array, rtol=1e-5, atol=1e-6, err_msg=name)


@pytest.mark.parametrize(
    ("case", "reason"),
    [
        (Case("dropout", model=dropout_mlp), r"captured: .*random.*; by row: .*random"),
        (Case("batchnorm cnn", model=batchnorm_cnn, **IMAGES), r".*BatchNorm2d in training mode normalizes each row"),
        (Case("kept", local={"optimizer": "adam", "keep_optimizer": True}), r"local.keep_optimizer keeps the state"),
    ],
)
def test_what_cannot_be_batched_is_refused_by_name_and_trained_alone(case: Case, reason: str) -> None:
    training = private(case).training()
    with pytest.raises(CannotBatch, match=reason):
        Batched(training)
    choice = choose(training, {}, list(SIZES), name="batched", resources=Resources(workers=1))
    assert choice.engine.name == "sequential"
    assert re.match(f"not batched: {reason}", choice.reasons[0], re.S)


def test_a_sample_without_any_row_is_no_step_where_the_clients_share_the_noise() -> None:
    training = private(Case("mlp"), **SHARED, **{"privacy.sample_rate": 1e-9}).training()
    version, jobs = first_version(training), [Job(site, seed=5) for site in SIZES]
    for engine in (Batched(training), Sequential(training)):
        for trained in all_trained(engine.train(version, jobs)):
            assert not any(array.any() for array in trained.update.values())


def test_a_batch_whose_rounding_takes_too_much_is_refused_by_both_engines_in_the_same_words() -> None:
    training = private(Case("mlp"), **{**SHARED, "privacy.batch": 1e6}).training()
    version, jobs = first_version(training), [Job("b", seed=1)]
    said = []
    for engine in (Batched(training), Sequential(training)):
        with pytest.raises(ClientFailed, match=r"client b failed:(.|\n)*privacy.batch: got 1e\+06: rounding") as caught:
            all_trained(engine.train(version, jobs))
        said.append(str(caught.value).strip().splitlines()[-1])
    assert said[0] == said[1]


def test_a_delta_that_would_publish_an_example_of_a_client_is_refused_by_its_name() -> None:
    training = private(Case("mlp"), **{"privacy.delta": 0.03}).training()
    with pytest.raises(ClientFailed, match=r"client b failed:(.|\n)*privacy.delta: got 0.03 with 40 training examples"):
        all_trained(Batched(training).train(first_version(training), [Job(site, seed=1) for site in SIZES]))
