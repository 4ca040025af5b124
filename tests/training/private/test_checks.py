"""What has no gradients of single rows, refused by the layer's name; the trial leaves no trace."""

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn
from torch.nn import functional

from atoll.training.data.units import Units
from atoll.training.private.checks import Trial, choose


class Centred(nn.Module):
    def forward(self, h: torch.Tensor) -> torch.Tensor:
        return h - h.mean(0)


class InItsParent(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.inner, self.out = nn.Linear(4, 4), nn.Linear(4, 3)

    def forward(self, h: torch.Tensor) -> torch.Tensor:
        inner = self.inner(h)
        found: torch.Tensor = self.out(inner - inner.mean(0))
        return found


class Reads(nn.Module):
    def forward(self, h: torch.Tensor) -> torch.Tensor:
        return h / 2 if h.abs().max().item() > 1e6 else h


class Counts(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("seen", torch.zeros(()))

    def forward(self, h: torch.Tensor) -> torch.Tensor:
        self.seen += 1
        return h


class Joined(nn.Module):
    def forward(self, h: torch.Tensor) -> torch.Tensor:
        return h.flatten()[:3].unsqueeze(0)


def in_batch(outputs: torch.Tensor, _targets: torch.Tensor) -> torch.Tensor:
    """Return a contrastive loss, which is 0 for a row alone."""
    return functional.cross_entropy(outputs @ outputs.T, torch.arange(len(outputs)))


def needs_two(outputs: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
    if len(outputs) < 2:
        raise ValueError("at least two rows")
    return functional.cross_entropy(outputs, targets)


def with_hook() -> nn.Module:
    model = nn.Sequential(nn.Linear(4, 3))
    model[0].weight.register_hook(lambda gradient: gradient * 2)
    return model


def between(layer: nn.Module) -> Callable[[], nn.Module]:
    return lambda: nn.Sequential(nn.Linear(4, 4), layer, nn.Linear(4, 3))


@pytest.mark.parametrize(
    ("model", "loss", "words"),
    [
        (between(nn.BatchNorm1d(4)), functional.cross_entropy, "1: BatchNorm1d in training mode"),
        (between(nn.InstanceNorm1d(4, track_running_stats=True)), functional.cross_entropy, "1: InstanceNorm1d keeps"),
        (between(Counts()), functional.cross_entropy, "1.seen: a forward pass changes this buffer"),
        (between(Centred()), functional.cross_entropy, "1: the outputs of a row alone differ"),
        (
            lambda: nn.Sequential(nn.Linear(4, 4), InItsParent()),
            functional.cross_entropy,
            "1: the outputs of a row alone differ",
        ),
        (between(Reads()), functional.cross_entropy, "1: it reads values of tensors (.item()"),
        (
            lambda: nn.Sequential(nn.Linear(4, 3), Joined()),
            functional.cross_entropy,
            "Sequential: of 5 rows it returns",
        ),
        (lambda: nn.Linear(4, 3), in_batch, "the mean of their losses, each alone, 0"),
        (lambda: nn.Linear(4, 3), needs_two, "the loss cannot be called on a row alone"),
        (
            lambda: nn.Linear(4, 3),
            lambda outputs, targets: functional.cross_entropy(outputs, targets, reduction="sum"),
            "say by what with Task(units=...)",
        ),
        (with_hook, functional.cross_entropy, "0.weight: a hook changes its gradient"),
    ],
)
def test_it_is_refused_by_name(model: Callable[[], nn.Module], loss: Any, words: str) -> None:
    torch.manual_seed(0)
    built = model().train()
    before = {name: value.clone() for name, value in built.state_dict().items()}
    trial = Trial(
        model=built, loss=loss, units=Units(), inputs=torch.randn(5, 4), targets=torch.randint(0, 3, (5,)), rows=5
    )
    found, faults = choose(trial, 1.0)
    assert found is None
    assert any(words in fault for fault in faults), faults
    assert all(torch.equal(value, before[name]) for name, value in built.state_dict().items())
    assert built.training


def test_a_batch_without_rows_is_refused() -> None:
    trial = Trial(
        model=nn.Linear(4, 3),
        loss=functional.cross_entropy,
        units=Units(),
        inputs={"x": torch.randn(5, 4), "number": torch.tensor(3)},
        targets=torch.zeros(5, dtype=torch.int64),
        rows=5,
    )
    found, (fault,) = choose(trial, 1.0)
    assert found is None
    assert "a tensor of shape ()" in fault


@pytest.mark.parametrize(
    ("loss", "units"),
    [
        (lambda outputs, targets: functional.cross_entropy(outputs, targets, reduction="sum"), Units("sum")),
        (functional.cross_entropy, Units()),
    ],
)
def test_random_layers_and_frozen_batch_norms_are_allowed(loss: Any, units: Units) -> None:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(4, 4), nn.BatchNorm1d(4), nn.Dropout(0.4), nn.Linear(4, 3)).train()
    model[1].eval()
    state = torch.random.get_rng_state()
    trial = Trial(
        model=model, loss=loss, units=units, inputs=torch.randn(5, 4), targets=torch.randint(0, 3, (5,)), rows=5
    )
    torch.random.set_rng_state(state)
    found, faults = choose(trial, 1.0)
    assert faults == []
    assert found is not None
    assert model.training
    assert not model[1].training
    assert torch.equal(torch.random.get_rng_state(), state)
