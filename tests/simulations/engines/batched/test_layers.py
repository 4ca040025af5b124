"""Layers whose clients have buffers, generators or states of their own, beside a plain loop over each client alone."""

import threading
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import nn
from torch.nn import functional
from torch.utils.data import TensorDataset

from atoll import Local, Task
from atoll.simulations.engines.batched.batched import Batched
from atoll.simulations.engines.batched.stack import CannotBatch
from atoll.simulations.engines.batched.trainer import BatchTrainer
from atoll.simulations.engines.engine import ClientFailed, Job, Training
from atoll.simulations.engines.sequential import Sequential
from atoll.task.arrays import Arrays
from tests.simulations.engines.batched.test_batched import check, seeded
from tests.simulations.engines.cases import (
    SIZES,
    Case,
    all_trained,
    batchnorm_cnn,
    dropout_mlp,
    first_version,
    images,
    sentences,
    token_loss,
    vectors,
)


def tokens(count: int, seed: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Make sentences with a class each."""
    words, _ = sentences(count, seed)
    return words, words.sum(1) % 3


class Sequential3(nn.Module):
    """A classifier of sentences by the last output of a recurrent layer.

    Args:
        layer: maps (n, 6, 4), or (6, n, 4), as torch's recurrent layers.
        width: the width of its outputs.
        first: makes the first state from the number of examples; None: there is none.
        scaled: whether the model has a parameter of its own, so that torch.func has to map it.
    """

    def __init__(
        self,
        layer: Callable[[], nn.Module],
        width: int = 5,
        first: Callable[[int], Any] | None = None,
        scaled: bool = False,
    ) -> None:
        super().__init__()
        self.embed, self.layer, self.head = nn.Embedding(11, 4, padding_idx=0), layer(), nn.Linear(2 * width, 3)
        self.first = first
        self.scale = nn.Parameter(torch.ones(4)) if scaled else 1.0

    def forward(self, words: torch.Tensor) -> torch.Tensor:
        x = self.embed(words) * self.scale
        x = x if self.layer.batch_first else x.transpose(0, 1)
        outputs, last = self.layer(x, None if self.first is None else self.first(len(words)))
        outputs = outputs[:, -1] if self.layer.batch_first else outputs[-1]
        last = last[1] if isinstance(last, tuple) else last
        y: torch.Tensor = self.head(torch.cat([outputs, last[-1] if outputs.shape[-1] == 5 else outputs], 1))
        return y


class Attending(nn.Module):
    """A classifier of sentences by attention, to other words with a mask, and then to itself with weights.

    Args:
        batch_first: the order of the axes.
        scaled: as in `Sequential3`.
        p: the probability of dropout.
        others: further arguments of the first attention.
    """

    def __init__(self, batch_first: bool = True, scaled: bool = False, p: float = 0.0, **others: Any) -> None:
        super().__init__()
        self.embed = nn.Embedding(11, 8)
        self.cross = nn.MultiheadAttention(8, 2, batch_first=batch_first, dropout=p, **others)
        self.own = nn.MultiheadAttention(8, 4, batch_first=batch_first, bias=False)
        self.memory, self.head = nn.Linear(8, others.get("kdim", 8)), nn.Linear(9, 3)
        self.scale = nn.Parameter(torch.ones(8)) if scaled else 1.0

    def forward(self, words: torch.Tensor) -> torch.Tensor:
        x = self.embed(words) * self.scale
        memory = self.memory(x)[:, :4]
        if not self.cross.batch_first:
            x, memory = x.transpose(0, 1), memory.transpose(0, 1)
        padding = (words[:, :4] == 0).index_fill(1, torch.tensor([0]), False)
        x, _ = self.cross(x, memory, memory, key_padding_mask=padding, need_weights=False)
        x, weights = self.own(x, x, x, attn_mask=torch.ones(6, 6, dtype=torch.bool).triu(1))
        x = x if self.cross.batch_first else x.transpose(0, 1)
        y: torch.Tensor = self.head(torch.cat([x[:, -1], weights.square().sum((1, 2))[:, None]], 1))
        return y


class Encoder(nn.Module):
    """A language model of torch's own layers.

    Args:
        scaled: as in `Sequential3`.
        p: the probability of dropout.
    """

    def __init__(self, scaled: bool, p: float) -> None:
        super().__init__()
        self.embed, self.head = nn.Embedding(11, 8), nn.Linear(8, 11)
        self.places = nn.Parameter(torch.zeros(6, 8)) if scaled else 0.0
        layer = nn.TransformerEncoderLayer(8, 2, 16, dropout=p, batch_first=True)
        self.encoder = nn.TransformerEncoder(layer, 2, enable_nested_tensor=False)

    def forward(self, words: torch.Tensor) -> torch.Tensor:
        x = self.embed(words) + self.places
        y: torch.Tensor = self.head(self.encoder(x, nn.Transformer.generate_square_subsequent_mask(6), is_causal=True))
        return y


class Functions(nn.Module):
    """A model that calls functions with dropout, in place of layers.

    Args:
        scaled: as in `Sequential3`.
    """

    def __init__(self, scaled: bool) -> None:
        super().__init__()
        self.convolution, self.head = nn.Conv2d(1, 8, 3), nn.Linear(8 * 36, 3)
        self.scale = nn.Parameter(torch.ones(8, 1, 1)) if scaled else 1.0

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = functional.dropout2d(self.convolution(x) * self.scale, 0.3, self.training)
        x = functional.alpha_dropout(functional.selu(x), 0.2, training=self.training).flatten(2)
        x = functional.scaled_dot_product_attention(x, x, x, dropout_p=0.25, is_causal=True)
        y: torch.Tensor = self.head(functional.dropout(x.flatten(1), inplace=True))
        return y


def normalized(**options: Any) -> Callable[[], nn.Module]:
    def model() -> nn.Module:
        return nn.Sequential(
            nn.Unflatten(1, (2, 3)),
            nn.Conv1d(2, 4, 2, bias=False),
            nn.BatchNorm1d(4, **options),
            nn.Tanh(),
            nn.Flatten(),
            nn.Linear(8, 3),
        )

    return model


class ScaledNorm(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layers, self.scale = normalized()(), nn.Parameter(torch.ones(6))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y: torch.Tensor = self.layers(x * self.scale)
        return y


TOKENS: dict[str, Any] = {"examples": tokens}
WORDS: dict[str, Any] = {"examples": sentences, "loss": token_loss}


def recurrent(kind: type[nn.Module], *args: Any, **options: Any) -> Callable[[], nn.Module]:
    return lambda: kind(4, 5, *args, **options)


def ones(layers: int, both: bool = False) -> Callable[[int], Any]:
    def first(count: int) -> Any:
        state = torch.ones(layers, count, 5)
        return (state, 2 * state) if both else state

    return first


NEW = [
    (Case("batchnorm cnn", model=batchnorm_cnn, examples=images, local={"lr": 0.05, "epochs": 2}), "stacked"),
    (Case("batchnorm cnn kept", model=batchnorm_cnn, examples=images, local={"keep": "batchnorm"}), "stacked"),
    (Case("batchnorm", model=normalized(), local={"momentum": 0.9, "epochs": 2}), "stacked"),
    (Case("batchnorm under scaffold", model=normalized(), algorithm="scaffold"), "stacked"),
    (Case("batchnorm of all", model=normalized(), local={"batch_size": None}), "stacked"),
    (Case("batchnorm stopped", model=normalized(), local={"epochs": 3}, steps=2), "stacked"),
    (Case("batchnorm, mean of all batches", model=normalized(momentum=None, affine=False)), "stacked"),
    (Case("batchnorm without buffers", model=normalized(track_running_stats=False)), "stacked"),
    (Case("batchnorm in a mapped model", model=ScaledNorm, local={"epochs": 2}), "mapped"),
    (Case("dropout", model=dropout_mlp, local={"epochs": 2}), "stacked"),
    (Case("dropout in order", model=dropout_mlp, local={"shuffle": False}), "stacked"),
    (Case("dropout by adam", model=dropout_mlp, local={"optimizer": "adam", "lr": 0.01}), "stacked"),
    (Case("functions", model=lambda: Functions(False), examples=images), "stacked"),
    (Case("functions in a mapped model", model=lambda: Functions(True), examples=images), "mapped"),
    (Case("rnn", model=lambda: Sequential3(recurrent(nn.RNN, batch_first=True)), **TOKENS), "stacked"),
    (
        Case("rnn relu", model=lambda: Sequential3(recurrent(nn.RNN, nonlinearity="relu"), first=ones(1)), **TOKENS),
        "stacked",
    ),
    (Case("gru", model=lambda: Sequential3(recurrent(nn.GRU, batch_first=True)), **TOKENS), "stacked"),
    (Case("lstm", model=lambda: Sequential3(recurrent(nn.LSTM, batch_first=True)), **TOKENS), "stacked"),
    (
        Case(
            "gru twice, both ways, dropout",
            model=lambda: Sequential3(recurrent(nn.GRU, 2, bidirectional=True, dropout=0.5), width=10, first=ones(4)),
            **TOKENS,
        ),
        "stacked",
    ),
    (
        Case(
            "lstm twice, dropout, without bias",
            model=lambda: Sequential3(
                recurrent(nn.LSTM, 2, bias=False, dropout=0.5, batch_first=True), first=ones(2, both=True)
            ),
            **TOKENS,
        ),
        "stacked",
    ),
    (
        Case("lstm mapped", model=lambda: Sequential3(recurrent(nn.LSTM, 2, dropout=0.5), scaled=True), **TOKENS),
        "mapped",
    ),
    (Case("gru mapped", model=lambda: Sequential3(recurrent(nn.GRU), first=ones(1), scaled=True), **TOKENS), "mapped"),
    (Case("attention", model=Attending, **TOKENS), "stacked"),
    (Case("attention of sequences first", model=lambda: Attending(False, p=0.3), **TOKENS), "stacked"),
    (Case("attention of two widths", model=lambda: Attending(kdim=6, vdim=6), **TOKENS), "stacked"),
    (Case("attention mapped", model=lambda: Attending(False, scaled=True, p=0.3), **TOKENS), "mapped"),
    (Case("encoder", model=lambda: Encoder(False, 0.0), **WORDS), "stacked"),
    (Case("encoder with dropout", model=lambda: Encoder(False, 0.1), **WORDS), "stacked"),
    (Case("encoder mapped with dropout", model=lambda: Encoder(True, 0.1), **WORDS), "mapped"),
]


@pytest.mark.slow
@pytest.mark.parametrize(("case", "kind"), NEW, ids=lambda value: getattr(value, "name", value))
def test_a_layer_agrees_with_a_deployed_client(case: Case, kind: str) -> None:
    case = replace(case, model=seeded(case.model))
    training = case.training()
    assert BatchTrainer(training, at_once=3).kind == kind
    check(case, training)


def by_a_plain_loop(training: Training, version: Arrays, job: Job) -> Arrays:
    """Train a client by torch's own layers and optimizer alone; return the change of each tensor."""
    task, local = training.task, training.local
    assert isinstance(task, Task)
    model = task.model().train()
    model.load_state_dict({name: torch.tensor(array) for name, array in version.items()})
    inputs, targets = task.data(job.client_id, "train").tensors
    sizes = [local.batch_size] * (len(inputs) // local.batch_size)
    sizes += [rest] if (rest := len(inputs) % local.batch_size) else []
    if len(sizes) > 1 and sizes[-1] == 1 < sizes[-2] and any(isinstance(m, nn.BatchNorm1d) for m in model.modules()):
        sizes[-2:] = [sizes[-2] + 1]
    optimizer = torch.optim.SGD(model.parameters(), lr=local.lr)
    torch.manual_seed(job.seed)
    generator = torch.Generator().manual_seed(int(torch.randint(2**62, ())))
    for _ in range(local.epochs):
        for rows in torch.randperm(len(inputs), generator=generator).split(sizes):
            optimizer.zero_grad()
            task.loss(model(inputs[rows]), targets[rows]).backward()
            optimizer.step()
    return {name: tensor.detach().numpy() - version[name] for name, tensor in model.state_dict().items()}


def of_vectors() -> nn.Module:
    # of two rows that are nearly equal a small eps makes one and minus one: the rounding would decide which
    return nn.Sequential(nn.Linear(6, 8), nn.BatchNorm1d(8, eps=0.1), nn.Dropout(0.3), nn.Tanh(), nn.Linear(8, 3))


KINDS: list[tuple[Callable[[], nn.Module], Any]] = [
    (of_vectors, vectors),
    (lambda: Sequential3(recurrent(nn.GRU, 2, dropout=0.2, batch_first=True)), tokens),
    (lambda: Sequential3(recurrent(nn.LSTM)), tokens),
]


@pytest.mark.slow
@settings(max_examples=12, deadline=None)
@given(
    sizes=st.lists(st.integers(2, 20), min_size=1, max_size=6),
    batch_size=st.integers(2, 9),
    epochs=st.integers(1, 2),
    at_once=st.integers(1, 4),
    kind=st.sampled_from(KINDS),
)
def test_clients_of_any_sizes_agree_with_a_plain_loop(
    sizes: list[int], batch_size: int, epochs: int, at_once: int, kind: tuple[Callable[[], nn.Module], Any]
) -> None:
    """Batches of one join those before, masks are the same, running statistics and states are each client's."""
    model, examples = kind
    task = Task(
        model=seeded(model),
        data=lambda site, split: TensorDataset(*examples(sizes[int(site)], int(site))),
        sites=[str(number) for number in range(len(sizes))],
        loss=functional.cross_entropy,
        metrics={},
        local=Local(batch_size=batch_size, epochs=epochs, lr=0.05),
    )
    training = Training(task=task)
    version, jobs = first_version(training), [Job(site, seed) for seed, site in enumerate(task.sites)]
    engine = Batched(training, at_once=at_once)
    for job, result in zip(jobs, all_trained(engine.train(version, jobs)), strict=True):
        for name, expected in by_a_plain_loop(training, version, job).items():
            np.testing.assert_allclose(result.update[name], expected, rtol=1e-3, atol=1e-5, err_msg=name)


def test_a_client_of_one_example_fails_in_a_batch_norm_as_it_does_alone() -> None:
    training = Case("one example", model=of_vectors).training()
    engine, jobs = Batched(training), [Job(site, seed) for seed, site in enumerate(SIZES)]
    with pytest.raises(ClientFailed, match=r"client e failed:\nTraceback[\s\S]*TaskBroken: a batch norm has a single"):
        list(engine.train(first_version(training), jobs))


def test_a_second_product_draws_the_masks_of_its_own_clients() -> None:
    training = Case("dropout", model=dropout_mlp).training()
    version = first_version(training)
    jobs = [Job(site, seed) for seed, site in enumerate(SIZES)]
    together, apart = Batched(training), Batched(training)
    expected = all_trained(together.train(version, jobs))
    for index in reversed(range(len(jobs))):
        (found,) = all_trained(apart.train(version, [jobs[index]]))
        np.testing.assert_allclose(found.row, expected[index].row, rtol=1e-4, atol=1e-6)


def test_dropout_that_begins_after_the_trial_is_trained_alone() -> None:
    """The first steps do not draw, so that the functions are no longer watched when one does."""

    class Late(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.layer = nn.Linear(6, 3)

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            y: torch.Tensor = self.layer(functional.dropout(x, 0.5, training=begun.is_set()))
            return y

    begun = threading.Event()  # in no state that clients begin with, as a plain variable is
    training = Case("late", model=Late).training()
    engine = Batched(training)
    version, jobs = first_version(training), [Job(site, seed) for seed, site in enumerate(SIZES)]
    begun.set()
    expected = all_trained(Sequential(training).train(version, jobs))
    for found, alone in zip(all_trained(engine.train(version, jobs)), expected, strict=True):
        np.testing.assert_array_equal(found.row, alone.row)


def test_a_mask_of_attention_that_differs_between_clients_is_refused() -> None:
    with pytest.raises(CannotBatch, match="mapped: the mask of an attention differs between the clients"):
        Batched(Case("own mask", model=OwnMask, **TOKENS).training())


class OwnMask(nn.Module):
    """A model with a trained mask of the attention."""

    def __init__(self) -> None:
        super().__init__()
        self.embed, self.attention = nn.Embedding(11, 8), nn.MultiheadAttention(8, 2, batch_first=True)
        self.mask, self.head = nn.Parameter(torch.zeros(6, 6)), nn.Linear(8, 3)

    def forward(self, words: torch.Tensor) -> torch.Tensor:
        x = self.embed(words)
        y: torch.Tensor = self.head(self.attention(x, x, x, attn_mask=self.mask)[0][:, 0])
        return y
