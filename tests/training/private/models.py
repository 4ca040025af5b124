"""Models, losses and rows whose example gradients are computed, each with its gradients by a plain loop."""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn
from torch.nn import functional

from atoll.parallel.models.decoder import Decoder, DecoderConfig
from atoll.training.data.units import Units
from tests.later import later

peft, transformers = later("peft"), later("transformers")

COUNTED = [12, 5, 2, 7, 12, 3]
"""Tokens of each row with a target; the others have -100."""


@dataclass
class Case:
    """A model with a batch."""

    model: nn.Module
    loss: Callable[[Any, Any], torch.Tensor]
    inputs: Any
    targets: Any
    units: Units

    @property
    def rows(self) -> int:
        return len(self.targets)

    def alone(self, row: int) -> torch.Tensor:
        part = slice(row, row + 1)
        return self.loss(self.model(self.inputs[part]), self.targets[part])


def loop(case: Case, clip_norm: float) -> tuple[dict[str, torch.Tensor], list[float]]:
    """Return the clipped sum in float64 and the norms, row after row."""
    named = {name: p for name, p in case.model.named_parameters() if p.requires_grad}
    total = {name: torch.zeros_like(p, dtype=torch.float64) for name, p in named.items()}
    norms = []
    for row in range(case.rows):
        found = torch.autograd.grad(case.alone(row), [*named.values()], allow_unused=True)
        gradients = [torch.zeros_like(p) if g is None else g for p, g in zip(named.values(), found, strict=True)]
        norms.append(float(torch.stack([g.double().square().sum() for g in gradients]).sum().sqrt()))
        for name, gradient in zip(named, gradients, strict=True):
            total[name] += gradient.double() * min(1.0, clip_norm / norms[-1])
    return total, norms


def classified(model: nn.Module, *shape: int) -> Case:
    torch.manual_seed(1)
    return Case(model, functional.cross_entropy, torch.randn(6, *shape), torch.randint(0, 3, (6,)), Units())


def mlp() -> Case:
    return classified(nn.Sequential(nn.Linear(5, 7), nn.ReLU(inplace=True), nn.Linear(7, 3)), 5)


def cnn() -> Case:
    layers = [nn.Conv2d(2, 8, 3, padding=1, stride=2), nn.GroupNorm(2, 8), nn.ReLU(), nn.Conv2d(8, 4, 3, groups=2)]
    return classified(nn.Sequential(*layers, nn.Flatten(), nn.Linear(16, 3)), 2, 8, 8)


class Recurrent(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layer, self.out = nn.LSTM(4, 6, batch_first=True), nn.Linear(6, 3)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        found: torch.Tensor = self.out(self.layer(x)[0][:, -1])
        return found


def lstm() -> Case:
    return classified(Recurrent(), 3, 4)


class Shared(nn.Module):
    """A layer that is called twice, a weight under two names, and a parameter beside the layers."""

    def __init__(self) -> None:
        super().__init__()
        self.a, self.b, self.out = nn.Linear(6, 6), nn.Linear(6, 6), nn.Linear(6, 3)
        self.b.weight = self.a.weight

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        found: torch.Tensor = self.out(self.b(self.a(self.a(x).tanh()).tanh()))
        return found


def shared() -> Case:
    return classified(Shared(), 6)


class Elsewhere(nn.Module):
    """A weight that is used outside of its layer's call, and a scalar beside the layers."""

    def __init__(self) -> None:
        super().__init__()
        self.layer, self.out = nn.Linear(6, 6), nn.Linear(6, 3)
        self.scale = nn.Parameter(torch.tensor(0.7))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        found: torch.Tensor = self.out(functional.linear(self.layer(x).tanh(), self.layer.weight) * self.scale)
        return found


def elsewhere() -> Case:
    return classified(Elsewhere(), 6)


def token_loss(logits: torch.Tensor, tokens: torch.Tensor) -> torch.Tensor:
    """Return the mean over the tokens that count."""
    return functional.cross_entropy(logits[:, :-1].flatten(0, 1), tokens[:, 1:].flatten(), ignore_index=-100)


def token_units() -> Units:
    return Units(lambda tokens: (tokens[:, 1:] != -100).sum())


def of_tokens(model: nn.Module, loss: Callable[[Any, Any], torch.Tensor], vocab: int) -> Case:
    torch.manual_seed(2)
    inputs = torch.randint(0, vocab, (len(COUNTED), 12))
    targets = inputs.clone()
    for row, counted in enumerate(COUNTED):
        targets[row, counted:] = -100
    return Case(model, loss, inputs, targets, token_units())


def decoder() -> Case:
    model = Decoder(DecoderConfig(vocab=17, dim=12, layers=2, heads=2, sequence=12))
    return of_tokens(model, token_loss, 17)


class Tied(nn.Module):
    """An embedding whose matrix is also the last layer's."""

    def __init__(self) -> None:
        super().__init__()
        self.tokens, self.norm, self.out = nn.Embedding(11, 8), nn.LayerNorm(8), nn.Linear(8, 11, bias=False)
        self.out.weight = self.tokens.weight

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        found: torch.Tensor = self.out(self.norm(self.tokens(x)))
        return found


def tied() -> Case:
    return of_tokens(Tied(), token_loss, 11)


def embedding() -> Case:
    model = nn.Sequential(nn.Embedding(11, 8, padding_idx=3), nn.Linear(8, 11))
    return of_tokens(model, token_loss, 11)


def lora(freezes_a: bool = False) -> Case:
    """Return adapters of PEFT on a Llama of transformers with tied embeddings."""
    torch.manual_seed(0)
    config = transformers.LlamaConfig(
        vocab_size=32,
        hidden_size=16,
        intermediate_size=24,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        max_position_embeddings=16,
        tie_word_embeddings=True,
    )
    targets = ["q_proj", "v_proj", "down_proj"]
    model = peft.get_peft_model(
        transformers.LlamaForCausalLM(config), peft.LoraConfig(r=4, lora_alpha=8, target_modules=targets)
    )
    for name, parameter in model.named_parameters():
        if "lora_B" in name:
            nn.init.normal_(parameter, std=0.1)
        if "lora_A" in name and freezes_a:
            parameter.requires_grad_(False)
    return of_tokens(model, lambda outputs, tokens: token_loss(outputs.logits.float(), tokens), 32)


def lora_frozen_a() -> Case:
    return lora(freezes_a=True)


def tied_decoder() -> Case:
    model = Decoder(DecoderConfig(vocab=18, dim=16, layers=2, heads=4, kv_heads=2, ffn=20, sequence=12, tied=True))
    return of_tokens(model, token_loss, 18)


def wide_decoder() -> Case:
    model = Decoder(DecoderConfig(vocab=18, dim=16, layers=2, heads=4, kv_heads=2, ffn=20, sequence=12))
    return of_tokens(model, token_loss, 18)
