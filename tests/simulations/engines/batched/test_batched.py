import copy
import math
from collections.abc import Callable, Iterable, Sequence
from dataclasses import replace
from itertools import islice, pairwise
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import example, given, settings
from hypothesis import strategies as st
from torch import nn
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.data import TensorDataset

from atoll import Local, Task
from atoll.simulations.engines.batched.batched import Batched
from atoll.simulations.engines.batched.chain import Chain
from atoll.simulations.engines.batched.nets import Net
from atoll.simulations.engines.batched.stack import CannotBatch, Stack
from atoll.simulations.engines.batched.trainer import BatchTrainer
from atoll.simulations.engines.engine import ClientFailed, Job, Training
from atoll.simulations.engines.loop import orders
from atoll.simulations.engines.rows import Columns
from atoll.simulations.engines.sequential import Sequential
from atoll.task.arrays import Arrays
from atoll.task.metrics import Metric, sound
from atoll.task.randomness import seed_everything
from atoll.tensors.layout import Tensor
from tests.simulations.engines.cases import (
    BATCHABLE,
    SIZES,
    Case,
    ReadOneByOne,
    accuracy,
    all_trained,
    first_version,
    images,
    mlp,
    noisy_mlp,
    sentences,
    subset_task,
    token_loss,
    two_rounds,
    vectors,
    wide_chain,
)
from tests.turns import in_turn


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


@pytest.mark.slow
@pytest.mark.parametrize("case", [in_turn(each, number=n, days=2, id=each.name) for n, each in enumerate(BATCHABLE)])
def test_it_agrees_with_a_deployed_client(case: Case) -> None:
    check(case, case.training())


class Encoder(nn.Module):
    """A model whose weights no stacked layer supports: torch's own attention, and a parameter of the model itself."""

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
    """A model with functions between layers, layers in a list, a frozen layer and a buffer."""

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
    """Compute a loss that is not a mean over examples, and that reads a number."""
    return nn.functional.cross_entropy(outputs, targets).sqrt() * (2.0 if len(targets) > float(targets.max()) else 1.0)


def tall(width: int = 6) -> nn.Module:
    """A nested chain, with a layer without bias, and two linear layers without a ReLU in between."""
    inside = nn.Sequential(nn.Linear(width, 7, bias=False), nn.Linear(7, 5), nn.ReLU())
    return nn.Sequential(nn.Flatten(), inside, nn.ReLU(), nn.Linear(5, 3))


def once_more() -> nn.Module:
    """A model that uses one layer twice, so that its gradients add up."""
    square = nn.Linear(6, 6)
    return nn.Sequential(square, nn.ReLU(), square, nn.ReLU(), nn.Linear(6, 3))


def convolutional() -> nn.Module:
    """A model like McMahan's: examples are reshaped first, a ReLU before each pooling, a layer without bias."""
    return nn.Sequential(
        nn.Flatten(),
        nn.Unflatten(1, (1, 8, 8)),
        nn.Conv2d(1, 4, 5, padding=2),
        nn.ReLU(),
        nn.MaxPool2d(2),
        nn.Sequential(nn.Conv2d(4, 6, 3, padding=1, bias=False), nn.ReLU(), nn.MaxPool2d(2)),
        nn.Flatten(),
        nn.Linear(24, 8),
        nn.ReLU(),
        nn.Linear(8, 3),
    )


def odd_convolutions() -> nn.Module:
    """A model with groups, strides and dilations; overlapping and padded pooling; no ReLU, or one after the pooling."""
    return nn.Sequential(
        nn.Conv2d(1, 6, (3, 2), stride=(1, 2), padding=(2, 1), dilation=(2, 1)),
        nn.MaxPool2d(3, stride=2, padding=1),
        nn.Conv2d(6, 4, 1, groups=2),
        nn.MaxPool2d((2, 1), stride=1, ceil_mode=True),
        nn.ReLU(),
        nn.ReLU(),
        nn.Flatten(),
        nn.Linear(36, 3),
    )


def same_size() -> nn.Module:
    """A model with named padding: with zeros on both sides, with dilation, and without any."""
    return nn.Sequential(
        nn.Conv2d(1, 4, (3, 5), padding="same"),
        nn.ReLU(),
        nn.MaxPool2d(2),
        nn.Conv2d(4, 6, (2, 3), padding="same", dilation=(2, 1)),
        nn.Conv2d(6, 5, 3, padding="valid"),
        nn.Flatten(),
        nn.Linear(20, 3),
    )


class Tied(nn.Module):
    """A model with one matrix in two layers, and one layer under two names."""

    def __init__(self) -> None:
        super().__init__()
        self.embed, self.head = nn.Embedding(11, 8), nn.Linear(8, 11, bias=False)
        self.head.weight = self.embed.weight
        self.first = self.second = nn.Linear(8, 8)

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        y: torch.Tensor = self.head(self.second(self.first(self.embed(tokens)).tanh()))
        return y


MORE = [
    (Case("perceptron", model=tall), "by hand"),
    (Case("perceptron by momentum", model=tall, local={"momentum": 0.9, "clip_norm": 0.5}), "by hand"),
    (Case("convolutions", model=convolutional, examples=images), "by hand"),
    (Case("convolutions of all", model=convolutional, examples=images, local={"batch_size": None}), "by hand"),
    (Case("convolutions by adam", model=convolutional, examples=images, local={"optimizer": "adam"}), "by hand"),
    (Case("convolutions near", model=convolutional, examples=images, local={"prox_mu": 0.5}), "by hand"),
    (Case("convolutions under scaffold", model=convolutional, examples=images, algorithm="scaffold"), "by hand"),
    (Case("odd convolutions", model=odd_convolutions, examples=images), "by hand"),
    (Case("encoder", model=Encoder, examples=sentences, loss=token_loss), "mapped"),
    (Case("residual", model=Residual), "stacked"),
    (Case("one layer under two names", model=once_more), "mapped"),
    (Case("tied", model=Tied, examples=sentences, loss=token_loss), "mapped"),
    (Case("tied, kept", model=Tied, examples=sentences, loss=token_loss, local={"keep": "head.*"}), "mapped"),
    (Case("convolutions of the same size", model=same_size, examples=images), "by hand"),
    (Case("a loss in a vector of one", loss=lambda *batch: nn.functional.cross_entropy(*batch)[None]), "stacked"),
    (Case("targets to ignore", examples=ignoring, local={"batch_size": 16}), "stacked"),
    (Case("smoothed", loss=nn.CrossEntropyLoss(label_smoothing=0.1)), "stacked"),
    (Case("plain module", loss=nn.CrossEntropyLoss()), "stacked"),
    (Case("regression", examples=numbers, loss=nn.functional.mse_loss), "stacked"),
    (Case("a loss of its own", loss=root_loss), "stacked"),
]


@pytest.mark.slow
@pytest.mark.parametrize(("case", "kind"), MORE, ids=lambda value: getattr(value, "name", value))
def test_other_models_and_losses_agree_too(case: Case, kind: str) -> None:
    case = replace(case, model=seeded(case.model))
    training = replace(case.training(), task=replace(case.task(), metrics={}))
    assert BatchTrainer(training, at_once=3).kind == kind
    check(case, training)


@pytest.mark.slow
@pytest.mark.parametrize("optimizer", ["adam", "adamw"])
def test_a_transformer_is_taken_with_adam(optimizer: str) -> None:
    """All but the keys' bias must agree: its gradient is rounding alone, of which Adam makes whole steps."""
    case = Case("encoder", model=seeded(Encoder), examples=sentences, loss=token_loss)
    case = replace(case, local={"optimizer": optimizer, "lr": 0.01, "epochs": 2})
    training = case.training()
    assert BatchTrainer(training, at_once=3).kind == "mapped"
    version, jobs = first_version(training), [Job(site, seed) for seed, site in enumerate(SIZES)]
    batched = all_trained(Batched(training, at_once=3).train(version, jobs))
    for ours, theirs in zip(batched, all_trained(Sequential(training).train(version, jobs)), strict=True):
        for name, expected in theirs.update.items():
            found = ours.update[name]
            if name == "block.self_attn.in_proj_bias":
                found, expected = np.delete(found, np.s_[8:16]), np.delete(expected, np.s_[8:16])
            np.testing.assert_allclose(found, expected, atol=2e-3 * np.abs(expected).max(), err_msg=name)


def frozen_in_part() -> nn.Module:
    layer = nn.Linear(6, 6)
    layer.bias.requires_grad_(False)
    return nn.Sequential(layer, nn.ReLU(), nn.Linear(6, 3))


def hooked() -> nn.Module:
    model = nn.Sequential(nn.Linear(6, 6), nn.ReLU(), nn.Linear(6, 3))
    model[1].register_forward_hook(lambda module, inputs, output: 2 * output)
    return model


NO_CHAINS: list[tuple[Sequence[nn.Module] | Callable[[], nn.Module], str]] = [
    (once_more, "2 is used twice"),
    (frozen_in_part, "0 is used twice, or frozen in part"),
    (hooked, "1 has hooks"),
    ([nn.Linear(6, 3), nn.ReLU()], "ends with a linear one"),
    ([nn.Linear(6, 3), nn.Tanh()], r"1 \(Tanh\) cannot be a layer"),
    ([nn.ReLU(), nn.Linear(6, 3)], r"0 \(ReLU\) cannot be a layer"),
    ([nn.Conv2d(1, 4, 3), nn.Linear(6, 3)], r"1 \(Linear\) cannot be a layer"),  # of each row of an image
    ([nn.Conv2d(1, 4, 3), nn.Flatten(2), nn.Linear(36, 3)], r"1 \(Flatten\) cannot be a layer"),
    ([nn.Linear(8, 8), nn.Conv2d(1, 4, 3), nn.Flatten(), nn.Linear(144, 3)], r"1 \(Conv2d\) cannot be a layer"),
    ([nn.Conv2d(1, 4, 3), nn.MaxPool2d(2, return_indices=True), nn.Linear(6, 3)], r"1 \(MaxPool2d\) cannot be a layer"),
    ([nn.Conv2d(1, 4, 2, padding="same"), nn.Flatten(), nn.Linear(256, 3)], "0 pads one side more than the other"),
    ([nn.Conv2d(1, 4, 3, padding=1, padding_mode="reflect"), nn.Flatten(), nn.Linear(256, 3)], "0 pads by reflect"),
    ([nn.Unflatten(0, (1, 5)), nn.Linear(6, 3)], r"0 \(Unflatten\) cannot be a layer"),  # moves the examples themselves
]


@pytest.mark.parametrize(("layers", "reason"), NO_CHAINS, ids=[reason for _, reason in NO_CHAINS])
def test_what_is_no_chain_is_not_done_by_hand(
    layers: Sequence[nn.Module] | Callable[[], nn.Module], reason: str
) -> None:
    def model() -> nn.Module:
        return layers() if callable(layers) else copy.deepcopy(nn.Sequential(*layers))

    with pytest.raises(CannotBatch, match=reason):
        BatchTrainer(Case("odd", model=model).training(), at_once=3, kind="by hand")


@pytest.mark.slow
@settings(max_examples=25, deadline=None)
@given(
    seed=st.integers(0, 2**32 - 1),
    clients=st.integers(1, 4),
    channels=st.lists(st.integers(1, 40), min_size=1, max_size=3),
    kernel=st.integers(1, 5),
    pools=st.booleans(),
)
def test_the_step_of_a_chain_is_autograds(
    seed: int, clients: int, channels: list[int], kernel: int, pools: bool
) -> None:
    """A step of plain SGD equals autograd's, for clients with different weights and numbers of examples.

    It is computed in doubles, because near 0 a rounding of float32 decides whether a ReLU is open or closed.
    """
    torch.manual_seed(seed)
    torch.set_default_dtype(torch.float64)
    try:
        _compare_a_step(np.random.default_rng(seed).integers(1, 9, clients), channels, kernel, pools)
    finally:
        torch.set_default_dtype(torch.float32)


def _compare_a_step(sizes: np.ndarray, channels: list[int], kernel: int, pools: bool) -> None:
    clients = len(sizes)
    layers: list[nn.Module] = []
    for before, after in pairwise([2, *channels]):
        layers += [nn.Conv2d(before, after, kernel, padding=kernel // 2), nn.ReLU()]
    layers += [nn.MaxPool2d(2)] if pools else []
    model = nn.Sequential(*layers, nn.Flatten(), nn.LazyLinear(5))
    inputs, targets = torch.randn(clients, int(sizes.max()), 2, 12, 12), torch.randint(5, (clients, int(sizes.max())))
    model(inputs[0])
    layout = [Tensor(name, "F32", tuple(parameter.shape)) for name, parameter in model.named_parameters()]
    places = Columns(tuple(layout)).places
    stack = Stack(Local(lr=0.1), places, clients, "cpu")
    chain = Chain(model, stack)
    start = torch.randn(clients, places[-1][1].stop) * 0.2
    stack.begin(start, None, clients=clients, length=int(sizes.max()))
    stack.take(clients)
    losses, outputs = chain.advance(inputs.flatten(0, 1), targets.flatten(), sizes)
    stack.settle()
    for i, size in enumerate(sizes):
        names = dict(model.named_parameters())
        with torch.no_grad():
            for name, columns, shape in places:
                names[name].copy_(start[i, columns].view(shape))
        expected = model(inputs[i, :size])
        torch.testing.assert_close(outputs.view(clients, -1, 5)[i, :size], expected.detach(), rtol=1e-9, atol=1e-9)
        loss = nn.functional.cross_entropy(expected, targets[i, :size])
        gradients = dict(zip(names, torch.autograd.grad(loss, list(names.values())), strict=True))
        torch.testing.assert_close(losses[i], loss.detach(), rtol=1e-9, atol=1e-9)
        for name, columns, shape in places:
            moved = (start[i, columns] - stack.blocks[name][i]).view(shape)
            distance = torch.linalg.vector_norm(moved - 0.1 * gradients[name])
            assert distance <= 1e-9 * torch.linalg.vector_norm(0.1 * gradients[name]) + 1e-12, name


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


@pytest.mark.parametrize("model", [mlp, wide_chain])
def test_a_client_that_leaves_the_finite_numbers_fails_alone(model: Callable[[], nn.Module]) -> None:
    case = Case("some", model=model, local={"epochs": 2})

    def data(site: str, split: str) -> TensorDataset:
        inputs, targets = vectors(SIZES[site], SIZES[site])
        return TensorDataset(inputs * (1e38 if site == "b" else 1), targets)

    training = replace(case.training(), task=replace(case.task(), data=data))
    jobs = [Job(site, seed) for seed, site in enumerate(SIZES)]
    engine, version = Batched(training), first_version(training)
    for _ in range(2):  # what it leaves behind is not there for the next ones either
        results = list(engine.train(version, jobs))
        assert [type(result).__name__ for result in results] == ["Trained", "Failed", "Trained", "Trained", "Trained"]


@pytest.mark.parametrize(
    ("model", "reason"),
    [
        (lambda: mlp().bfloat16(), "torch.bfloat16, and only float32 is stacked"),
        (lambda: mlp().requires_grad_(False), "nothing in the model is trained"),
        (lambda: Unused(), "the loss does not depend on spare.bias, spare.weight"),
        (noisy_mlp, r"stacked: the task draws random numbers in a step, and .*; mapped: .*rrelu"),
        (lambda: nn.Sequential(nn.Linear(6, 3), Evaluated(3)), r"1 \(BatchNorm1d\) is in evaluation mode"),
        (lambda: nn.Sequential(nn.LSTM(6, 3, proj_size=2)), r"0 \(LSTM\) has proj_size set"),
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


class Evaluated(nn.BatchNorm1d):
    """A batch norm that stays in evaluation mode."""

    def __new__(cls, width: int) -> Any:
        layer = nn.BatchNorm1d(width)
        layer.train = lambda mode=True: nn.Module.train(layer, False)  # type: ignore[method-assign]
        return layer


class Bag(nn.Module):
    """A model that averages the embeddings of its tokens."""

    def __init__(self, bare: bool) -> None:
        super().__init__()
        self.embed, self.head = nn.Embedding(11, 4), nn.Linear(4, 11)
        self.scale = nn.Parameter(torch.ones(())) if bare else 1.0

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        y: torch.Tensor = self.head(self.embed(tokens) * self.scale)
        return y


@pytest.mark.parametrize(("bare", "kind"), [(False, "stacked"), (True, "mapped")])
@pytest.mark.parametrize("token", [-1, 11])
def test_a_token_that_is_none_fails_as_it_does_alone(token: int, bare: bool, kind: str) -> None:
    def data(site: str, split: str) -> TensorDataset:
        words, targets = sentences(SIZES[site], SIZES[site])
        words = words.clone()
        words[0, 0] = token if site == "e" else 0
        return TensorDataset(words, targets)

    case = Case("tokens", model=lambda: Bag(bare), examples=sentences, loss=token_loss)
    training = replace(case.training(), task=replace(case.task(), data=data))
    engine = Batched(training)
    assert engine.kind == kind
    jobs = [Job(site, seed) for seed, site in enumerate(SIZES)]
    with pytest.raises(ClientFailed, match=r"client e failed:\nTraceback[\s\S]*IndexError: index out of range in self"):
        list(engine.train(first_version(training), jobs))


def test_what_fails_in_the_tasks_code_names_the_one_client() -> None:
    def loss(outputs: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
        if len(targets) == 7:
            raise ValueError("no loss today")
        return nn.functional.cross_entropy(outputs, targets)

    case = Case("loss", local={"batch_size": None}, loss=loss)
    sizes = {**dict.fromkeys("abcdef", 20), "g": 7}
    task = replace(case.task(), data=lambda site, split: TensorDataset(*vectors(sizes[site], 1)))
    training = replace(case.training(), task=task)
    jobs = [Job(site, seed) for seed, site in enumerate(sizes)]
    results = Batched(training).train(first_version(training), jobs)
    assert [result.client_id for result in islice(results, 6)] == list("abcdef")
    with pytest.raises(ClientFailed, match=r"client g failed:\nTraceback[\s\S]*no loss today"):
        next(results)


def test_a_client_with_a_far_wider_batch_is_in_no_product_with_the_others(monkeypatch: pytest.MonkeyPatch) -> None:
    sizes = {"a": 20, "b": 30, "wide": 4000, "c": 25, "d": 1}
    case = Case("skewed", local={"batch_size": None, "epochs": 2})
    task = replace(case.task(), data=lambda site, split: TensorDataset(*vectors(sizes[site], sizes[site])))
    training = replace(case.training(), task=replace(task, sites=["a", "b", "c"]))
    engine, version = Batched(training), first_version(training)
    jobs, widths = [Job(site, seed) for seed, site in enumerate(sizes)], list[tuple[int, ...]]()
    advance = Net.advance

    def watched(net: Net, inputs: torch.Tensor, targets: torch.Tensor, sizes: Any) -> Any:
        widths.append((len(inputs), *sorted(sizes)))
        return advance(net, inputs, targets, sizes)

    monkeypatch.setattr(Net, "advance", watched)
    batched = all_trained(engine.train(version, jobs))
    assert widths == 2 * [(4000, 4000)] + 2 * [(4 * 30, 1, 20, 25, 30)]
    for ours, theirs in zip(batched, all_trained(Sequential(training).train(version, jobs)), strict=True):
        assert ours.client_id == theirs.client_id
        np.testing.assert_allclose(ours.row, theirs.row, rtol=1e-4, atol=2e-6)


def test_a_task_with_a_training_of_its_own_is_refused() -> None:
    training = replace(Case("fit").training(), task=replace(Case("fit").task(), fit=lambda *_: 1.0))
    with pytest.raises(CannotBatch, match="the task has a custom training"):
        Batched(training)


ROUNDING = 3e-6
"""Bound on the float32 error of an input of a ReLU in `wide_chain`, a sum of n <= 161 products w x.

A pairwise sum is rounded by at most 2^-24 log2(n) sum |w x|, which is 7e-7 for the largest sums here (1.6). The errors
of w and x after some steps, 2^-24 each, add about as much again. A ReLU whose input is nearer to 0 may be open in one
engine and closed in the other, and then the gradients differ by a whole example's share. One client in sixty gets so
near.
"""


class Kinks(TorchDispatchMode):
    """Watch on the inputs of all ReLUs; `nearest` is the smallest magnitude."""

    nearest = math.inf

    def __torch_dispatch__(self, function: Any, types: Any, inputs: Any = (), named: Any = None) -> Any:
        if function is torch.ops.aten.relu.default:
            self.nearest = min(self.nearest, float(inputs[0].detach().abs().min()))
        return function(*inputs, **(named or {}))


def nearest_kink(training: Training, version: Arrays, job: Job) -> float:
    """Return how near an input of a ReLU comes to 0 in a client's exact training."""
    with Kinks() as kinks:
        in_doubles(training, version, job)
    return kinks.nearest


@pytest.mark.slow
@settings(max_examples=15, deadline=None)
@example(sizes=[1, 1, 1, 1, 1, 21], batch_size=None, epochs=2, at_once=1, steps=None, model=wide_chain)  # 1.5e-8
@given(
    sizes=st.lists(st.integers(1, 30), min_size=1, max_size=9),
    batch_size=st.none() | st.integers(1, 12),
    epochs=st.integers(1, 3),
    at_once=st.integers(1, 5),
    steps=st.none() | st.integers(1, 5),
    model=st.sampled_from([mlp, wide_chain]),
)
def test_clients_of_any_sizes_agree(
    sizes: list[int],
    batch_size: int | None,
    epochs: int,
    at_once: int,
    steps: int | None,
    model: Callable[[], nn.Module],
) -> None:
    names = [str(number) for number in range(len(sizes))]
    task = replace(
        Case("any", model=model).task(),
        sites=names,
        data=lambda site, split: TensorDataset(*vectors(sizes[int(site)], int(site))),
    )
    training = Training(task=task, overrides={"epochs": epochs, "batch_size": batch_size})
    jobs = [Job(name, seed=number, steps=steps) for number, name in enumerate(names)]
    version = first_version(training)
    batched = all_trained(Batched(training, at_once=at_once).train(version, jobs))
    alone = all_trained(Sequential(training).train(version, jobs))
    for ours, theirs, job in zip(batched, alone, jobs, strict=True):
        assert (ours.client_id, ours.work, ours.report) == (theirs.client_id, theirs.work, theirs.report)
        agrees = np.allclose(ours.row, theirs.row, rtol=1e-4, atol=2e-6)
        if not agrees and nearest_kink(training, version, job) < ROUNDING:
            continue  # it is open in the one, and closed in the other
        np.testing.assert_allclose(ours.row, theirs.row, rtol=1e-4, atol=2e-6)
        np.testing.assert_allclose(ours.statistics["accuracy"], theirs.statistics["accuracy"])
        np.testing.assert_allclose(ours.statistics["loss"], theirs.statistics["loss"], rtol=1e-5)


def in_doubles(training: Training, version: Arrays, job: Job) -> dict[str, np.ndarray[Any, Any]]:
    """Compute a client's update by SGD with decay and a proximal term, in float64, step by step."""
    task, local = training.task, training.local
    assert isinstance(task, Task)
    model = task.model().double()
    model.load_state_dict({name: torch.tensor(array).double() for name, array in version.items()})
    start = {name: parameter.detach().clone() for name, parameter in model.named_parameters()}
    inputs, targets = task.data(job.client_id, "train").tensors
    seed_everything(job.seed)
    epochs = orders(len(inputs), local.epochs, torch.Generator())
    batches = (rows for order in epochs for rows in order.split(local.batch_size or len(inputs)))
    for rows in islice(batches, job.steps):
        loss = nn.functional.cross_entropy(model(inputs[rows].double()), targets[rows])
        gradients = torch.autograd.grad(loss, list(model.parameters()))
        with torch.no_grad():
            for (name, weights), gradient in zip(model.named_parameters(), gradients, strict=True):
                pull = local.weight_decay * weights + local.prox_mu * (weights - start[name])
                weights -= local.lr * (gradient + pull)
    return {name: (weights.detach() - start[name]).numpy() for name, weights in model.named_parameters()}


@pytest.mark.slow
@pytest.mark.parametrize(
    "small",
    [
        {"weight_decay": 1e-3, "prox_mu": 0.1},
        pytest.param({"weight_decay": 1e-4}, marks=pytest.mark.long),
        pytest.param({"prox_mu": 0.01}, marks=pytest.mark.long),
    ],
)
def test_small_steps_with_decay_lose_no_more_to_rounding_than_alone(small: dict[str, float]) -> None:
    """W (1 - 1e-7) is rounded in the same direction at each step, so that errors accumulate over hundreds of steps."""
    training = Case("decay", local={"lr": 0.001, "epochs": 80, "batch_size": 8, **small}).training()
    version = first_version(training)
    jobs = [Job(client, seed) for seed, client in enumerate("ab")]
    errors = []
    for engine in (Sequential(training), Batched(training)):
        error = 0.0
        for result, job in zip(all_trained(engine.train(version, jobs)), jobs, strict=True):
            exact = in_doubles(training, version, job)
            error += sum(float(np.square(result.update[name] - exact[name]).sum()) for name in exact)
        errors.append(math.sqrt(error))
    alone, together = errors
    assert together < 2 * alone


def of_two_classes(outputs: Any, targets: Any) -> tuple[Any, int]:
    """Fail as an AUC of one class does."""
    if len(set(targets.tolist())) < 2:
        raise ValueError("only one class is present")
    return (outputs.argmax(1) == targets).sum(), len(targets)


def test_a_metric_that_fails_at_one_client_is_left_out_there_alone() -> None:
    """As in one process: the other metrics count, and so do the other clients."""

    def data(site: str, split: str) -> TensorDataset:
        classes = torch.zeros(6, dtype=torch.int64) if site == "b" else torch.arange(6) % 2
        return TensorDataset(torch.linspace(-1, 1, 12).reshape(6, 2), classes)

    metrics = {"accuracy": accuracy, "two": of_two_classes}
    task = Task(
        model=lambda: nn.Linear(2, 2),
        data=data,
        loss=nn.functional.cross_entropy,
        metrics=metrics,
        sites=["a", "b", "c"],
        local=Local(epochs=2, batch_size=6, lr=0.1),
    )
    training, jobs = Training(task=task), [Job(site, 1) for site in "abc"]
    version = first_version(training)
    found, expected = (
        [sound(metrics, each.statistics) for each in all_trained(engine(training).train(version, jobs))]
        for engine in (Batched, Sequential)
    )
    assert [each["two"] for each in expected] == [expected[0]["two"], (), expected[2]["two"]]
    for ours, theirs in zip(found, expected, strict=True):
        assert ours["two"] == theirs["two"]
        assert ours["accuracy"] == theirs["accuracy"]
