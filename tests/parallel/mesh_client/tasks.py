"""Small tasks whose local training is the same in one process and on a mesh."""

from dataclasses import replace
from typing import Any

import torch
from torch import nn
from torch.utils.data import Subset, TensorDataset

from atoll import Local, Task
from atoll.parallel.models.decoder import Decoder, DecoderConfig
from tests.parallel.models.cnn import CNN

VOCAB, LENGTH, EXAMPLES = 32, 8, 44
"""44 examples in batches of 8: the last one has 4."""


def sequences(site: str, split: str) -> TensorDataset | None:
    """Sequences of tokens; the target of each is the next one, and some are not counted."""
    if split == "test" and site == "nowhere":
        return None
    generator = torch.Generator().manual_seed(len(site) + (split == "test"))
    tokens = torch.randint(0, VOCAB, (EXAMPLES if split == "train" else 13, LENGTH + 1), generator=generator)
    targets = tokens[:, 1:].clone()
    targets[::3, :5] = -100
    return TensorDataset(tokens[:, :-1], targets)


def decoder() -> nn.Module:
    return Decoder(DecoderConfig(vocab=VOCAB, dim=16, layers=4, heads=4, ffn=24, sequence=LENGTH))


def loss(outputs: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
    return nn.functional.cross_entropy(outputs.flatten(0, -2), targets.flatten())


def right(outputs: torch.Tensor, targets: torch.Tensor) -> tuple[Any, Any]:
    counted = targets != -100
    return (outputs.argmax(dim=-1) == targets)[counted].sum(), counted.sum()


task = Task(
    model=decoder,
    data=sequences,
    loss=loss,
    sites=["here", "nowhere"],
    metrics={"right": right},
    local=Local(epochs=2, batch_size=8, lr=0.5),
    units=lambda targets: (targets != -100).sum(),
)
without_training_data = replace(
    task, data=lambda site, split: sequences(site, split) if split == "test" else Subset(sequences(site, split), [])
)

pictures = Task(
    model=lambda: CNN([1, 4, 8], 8, hidden=16),
    data=lambda site, split: TensorDataset(
        torch.randn(20, 1, 8, 8, generator=torch.Generator().manual_seed(1)), torch.arange(20) % 10
    ),
    loss=nn.functional.cross_entropy,
    sites=["here"],
    local=Local(batch_size=8, lr=0.1),
)


class Fading(nn.Module):
    """A factor that a counter of passes, which is no buffer, makes smaller."""

    def __init__(self) -> None:
        super().__init__()
        self.passes = 0

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.passes += self.training
        return x * 0.9**self.passes


dropping = replace(
    task,
    model=lambda: nn.Sequential(
        nn.Embedding(VOCAB, 16), nn.Dropout(0.3), nn.Linear(16, 16), Fading(), nn.Linear(16, VOCAB)
    ),
)


class Following(nn.Module):
    """A layer over words minus their running mean, which each pass moves to that of its own examples."""

    def __init__(self, by_examples: bool) -> None:
        super().__init__()
        self.words, self.last, self.by_examples = nn.Embedding(VOCAB, 16), nn.Linear(16, VOCAB), by_examples
        self.register_buffer("mean", torch.zeros(16))

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        x = self.words(tokens)
        if self.training:
            self.mean.lerp_(x.detach().mean((0, 1)) if self.by_examples else torch.ones(16), 0.1)
        logits: torch.Tensor = self.last(x - self.mean)
        return logits


class TwiceRegistered(nn.Module):
    """One buffer and one layer under two names each."""

    def __init__(self) -> None:
        super().__init__()
        self.words, self.last = nn.Embedding(VOCAB, 16), nn.Linear(16, VOCAB)
        self.again = self.last
        self.register_buffer("scale", torch.full((16,), 0.7))
        self.words.register_buffer("shared", self.scale)

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        logits: torch.Tensor = self.again(self.words(tokens) * self.scale)
        return logits


def damped(parameters: Any, lr: float) -> torch.optim.Optimizer:
    """An optimizer of one's own that moves each element by itself, and whose step is smooth in the gradient."""
    return torch.optim.Adagrad(parameters, lr=lr, eps=10.0)


own_optimizer = replace(task, local=Local(batch_size=8, lr=3.0, optimizer=damped))
following = replace(task, model=lambda: Following(True))
counting_passes = replace(task, model=lambda: Following(False))
twice_registered = replace(task, model=TwiceRegistered)

with_fit = replace(task, fit=lambda model, data, local, deadline: 1.0)

three_sites = replace(task, sites=["a", "bb", "ccc"])
