from collections.abc import Callable, Iterable
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import nn
from torch.utils.data import TensorDataset

from atoll.parallel.arrays import Arrays
from atoll.parallel.metrics import Metric
from atoll.simulations.engines.batched import Batched, BatchTrainer
from atoll.simulations.engines.engine import Job, Training
from atoll.simulations.engines.sequential import Sequential
from atoll.simulations.engines.stack import CannotBatch
from tests.simulations.engines.cases import (
    BATCHABLE,
    SIZES,
    Case,
    ReadOneByOne,
    accuracy,
    all_trained,
    first_version,
    mlp,
    sentences,
    subset_task,
    token_loss,
    two_rounds,
    vectors,
)


def flat(arrays: Arrays, names: Iterable[str]) -> np.ndarray:
    return np.concatenate([arrays[name].ravel() for name in names] or [np.zeros(0)])


def check(case: Case, training: Training) -> None:
    engine = Batched(training, at_once=3)
    version = first_version(training)
    rounding = 5e-7 * np.linalg.norm(flat(version, version))  # of the weights themselves
    if case.algorithm == "scaffold":
        rounding /= training.local.lr  # a control variate is what they have moved over the rate
    for found, expected in two_rounds(case, lambda version, jobs: all_trained(engine.train(version, jobs)), training):
        for ours, theirs in ((found.update, expected.trained.update), (found.own, expected.own)):
            assert ours.keys() == theirs.keys()
            distance = np.linalg.norm(flat(ours, theirs) - flat(theirs, theirs))
            assert distance <= 1e-5 * np.linalg.norm(flat(theirs, theirs)) + rounding
        assert list(found.statistics) == list(expected.trained.statistics)
        for name, sums in expected.trained.statistics.items():
            np.testing.assert_allclose(found.statistics[name], sums, rtol=1e-5)
        assert (found.num_examples, found.work) == (expected.trained.num_examples, expected.trained.work)
        assert found.report == expected.report


@pytest.mark.parametrize("case", BATCHABLE, ids=lambda case: case.name)
def test_it_agrees_with_a_deployed_client(case: Case) -> None:
    check(case, case.training())


class Encoder(nn.Module):
    """Layers whose weights no stacked layer knows: torch's own attention, and a parameter of the model's own."""

    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(11, 8)
        self.place = nn.Parameter(torch.zeros(6, 8))
        self.block = nn.TransformerEncoderLayer(8, 2, 16, dropout=0.0, batch_first=True)
        self.head = nn.Linear(8, 11)

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        logits: torch.Tensor = self.head(self.block(self.embed(tokens) + self.place))
        return logits


class Residual(nn.Module):
    """Functions between layers, layers in a list, a frozen layer, a buffer."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Sequential(nn.Linear(6, 6), nn.LayerNorm(6), nn.Tanh()) for _ in range(2))
        self.frozen = nn.Linear(6, 6).requires_grad_(False)
        self.register_buffer("scale", torch.tensor(0.5))
        self.head = nn.Linear(6, 3, bias=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for layer in self.layers:
            x = x + layer(torch.relu(x)) * self.scale
        y: torch.Tensor = self.head(self.frozen(x).view(x.size(0), -1))
        return y


def ignoring(count: int, seed: int) -> tuple[torch.Tensor, torch.Tensor]:
    inputs, targets = vectors(count, seed)
    return inputs, torch.where(torch.arange(count) % 3 == 1, -100, targets)


def numbers(count: int, seed: int) -> tuple[torch.Tensor, torch.Tensor]:
    inputs, targets = vectors(count, seed)
    return inputs, torch.nn.functional.one_hot(targets, 3).float()


def root_loss(outputs: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
    """Not a mean over examples, and it asks for a number."""
    return nn.functional.cross_entropy(outputs, targets).sqrt() * (2.0 if len(targets) > float(targets.max()) else 1.0)


def tall(width: int = 6) -> nn.Module:
    """Nested, with a layer without bias, two without a bend between them, and classes as the outputs."""
    inside = nn.Sequential(nn.Linear(width, 7, bias=False), nn.Linear(7, 5), nn.ReLU())
    return nn.Sequential(nn.Flatten(), inside, nn.ReLU(), nn.Linear(5, 3))


def once_more() -> nn.Module:
    """One layer twice: its gradients add up."""
    square = nn.Linear(6, 6)
    return nn.Sequential(square, nn.ReLU(), square, nn.ReLU(), nn.Linear(6, 3))


MORE = [
    (Case("perceptron", model=tall), "by hand"),
    (Case("perceptron by momentum", model=tall, local={"momentum": 0.9, "clip_norm": 0.5}), "by hand"),
    (Case("encoder", model=Encoder, examples=sentences, loss=token_loss), "mapped"),
    (Case("residual", model=Residual), "stacked"),
    (Case("targets to ignore", examples=ignoring, local={"batch_size": 16}), "stacked"),
    (Case("smoothed", loss=nn.CrossEntropyLoss(label_smoothing=0.1)), "stacked"),
    (Case("plain module", loss=nn.CrossEntropyLoss()), "stacked"),
    (Case("regression", examples=numbers, loss=nn.functional.mse_loss), "stacked"),
    (Case("a loss of its own", loss=root_loss), "stacked"),
]


@pytest.mark.parametrize(("case", "kind"), MORE, ids=lambda value: getattr(value, "name", value))
def test_other_models_and_losses_agree_too(case: Case, kind: str) -> None:
    case = replace(case, model=seeded(case.model))
    training = replace(case.training(), task=replace(case.task(), metrics={}))
    assert BatchTrainer(training, at_once=3).kind == kind
    check(case, training)


@pytest.mark.parametrize(
    "model",
    [once_more, lambda: nn.Sequential(nn.Linear(6, 3), nn.ReLU()), lambda: nn.Sequential(nn.Linear(6, 3), nn.Tanh())],
)
def test_what_is_no_perceptron_is_not_done_by_hand(model: Callable[[], nn.Module]) -> None:
    with pytest.raises(CannotBatch, match="perceptron"):
        BatchTrainer(Case("odd", model=model).training(), at_once=3, kind="by hand")


def seeded(model: Callable[[], nn.Module]) -> Callable[[], nn.Module]:
    def build() -> nn.Module:
        torch.manual_seed(4)
        return model()

    return build


def test_metrics_are_mapped_or_called_for_each_client() -> None:
    def margin(outputs: torch.Tensor, targets: torch.Tensor) -> tuple[float, ...]:
        return outputs.max().item(), 1.0, float(len(targets))

    metrics = {
        "accuracy": accuracy,
        "margin": Metric(margin, lambda sums: sums[0] / sums[1]),
        "loss": lambda outputs, targets: (outputs.sum(), len(targets)),
    }
    case = Case("metrics", local={"epochs": 2})
    check(case, replace(case.training(), task=replace(case.task(), metrics=metrics)))


def test_clients_that_share_their_tensors_are_read_from_them() -> None:
    case = Case("subsets", local={"epochs": 2})
    check(case, replace(case.training(), task=subset_task(case.task())))


def test_a_client_that_fits_to_no_other_is_trained_by_itself() -> None:
    def data(site: str, split: str) -> Any:
        if site == "d":
            return ReadOneByOne(vectors(24, 24))
        inputs, targets = vectors(SIZES[site], SIZES[site])
        return TensorDataset(inputs, targets)

    training = replace(Case("mlp").training(), task=replace(Case("mlp").task(), data=data))
    version = first_version(training)
    jobs = [Job(site, seed) for seed, site in enumerate(SIZES)]
    batched = all_trained(Batched(training).train(version, jobs))
    for ours, theirs in zip(batched, all_trained(Sequential(training).train(version, jobs)), strict=True):
        assert ours.client_id == theirs.client_id
        np.testing.assert_allclose(ours.row, theirs.row, rtol=1e-4, atol=1e-6)
        if ours.client_id == "d":
            np.testing.assert_array_equal(ours.row, theirs.row)


def test_a_client_that_leaves_the_finite_numbers_fails_alone() -> None:
    case = Case("mlp", local={"epochs": 2})

    def data(site: str, split: str) -> TensorDataset:
        inputs, targets = vectors(SIZES[site], SIZES[site])
        return TensorDataset(inputs * (1e38 if site == "b" else 1), targets)

    training = replace(case.training(), task=replace(case.task(), data=data))
    jobs = [Job(site, seed) for seed, site in enumerate(SIZES)]
    results = list(Batched(training).train(first_version(training), jobs))
    assert [type(result).__name__ for result in results] == ["Trained", "Failed", "Trained", "Trained", "Trained"]


@pytest.mark.parametrize(
    ("model", "reason"),
    [
        (lambda: mlp().bfloat16(), "torch.bfloat16, and only float32 is stacked"),
        (lambda: mlp().requires_grad_(False), "nothing in the model is trained"),
        (lambda: Unused(), "the loss does not depend on spare.bias, spare.weight"),
        (lambda: FunctionalDropout(), r"stacked: the update of .* off, relative to its length; mapped: .*randomness"),
    ],
)
def test_what_cannot_be_batched_is_refused_with_the_reason(model: Callable[[], nn.Module], reason: str) -> None:
    with pytest.raises(CannotBatch, match=reason):
        Batched(Case("refused", model=model).training())


class Unused(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layer, self.spare = nn.Linear(6, 3), nn.Linear(6, 3)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y: torch.Tensor = self.layer(x)
        return y


class FunctionalDropout(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(6, 3)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y: torch.Tensor = self.layer(nn.functional.dropout(x, 0.5))
        return y


def test_a_task_with_a_training_of_its_own_is_refused() -> None:
    training = replace(Case("fit").training(), task=replace(Case("fit").task(), fit=lambda *_: 1.0))
    with pytest.raises(CannotBatch, match="the task has a training of its own"):
        Batched(training)


@settings(max_examples=15, deadline=None)
@given(
    sizes=st.lists(st.integers(1, 30), min_size=1, max_size=9),
    batch_size=st.none() | st.integers(1, 12),
    epochs=st.integers(1, 3),
    at_once=st.integers(1, 5),
    steps=st.none() | st.integers(1, 5),
)
def test_clients_of_any_sizes_agree(
    sizes: list[int], batch_size: int | None, epochs: int, at_once: int, steps: int | None
) -> None:
    names = [str(number) for number in range(len(sizes))]
    task = replace(
        Case("any").task(),
        sites=names,
        data=lambda site, split: TensorDataset(*vectors(sizes[int(site)], int(site))),
    )
    training = Training(task=task, overrides={"epochs": epochs, "batch_size": batch_size})
    jobs = [Job(name, seed=number, steps=steps) for number, name in enumerate(names)]
    version = first_version(training)
    batched = all_trained(Batched(training, at_once=at_once).train(version, jobs))
    for ours, theirs in zip(batched, all_trained(Sequential(training).train(version, jobs)), strict=True):
        assert (ours.client_id, ours.work, ours.report) == (theirs.client_id, theirs.work, theirs.report)
        np.testing.assert_allclose(ours.row, theirs.row, rtol=1e-4, atol=2e-6)
        np.testing.assert_allclose(ours.statistics["accuracy"], theirs.statistics["accuracy"])
        np.testing.assert_allclose(ours.statistics["loss"], theirs.statistics["loss"], rtol=1e-5)
