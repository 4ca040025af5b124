"""Layers whose clients have buffers, generators or states of their own, beside a plain loop over each client alone."""

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import nn
from torch.nn import functional

from atoll.simulations.engines.batched.batched import BatchTrainer
from tests.simulations.engines.batched.test_batched import check, seeded
from tests.simulations.engines.cases import (
    Case,
    batchnorm_cnn,
    dropout_mlp,
    images,
    sentences,
    token_loss,
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


@pytest.mark.parametrize(("case", "kind"), NEW, ids=lambda value: getattr(value, "name", value))
def test_a_layer_agrees_with_a_deployed_client(case: Case, kind: str) -> None:
    case = replace(case, model=seeded(case.model))
    training = case.training()
    assert BatchTrainer(training, at_once=3).kind == kind
    check(case, training)
