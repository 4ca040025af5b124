"""What a task holds of a model's parameters is found before a training that would put others in their places."""

import weakref
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn
from torch.utils.data import TensorDataset

from atoll import Task
from atoll.parallel.engine.plan import Plan
from atoll.parallel.trials.references import references
from atoll.parallel.trials.way import MeshWay
from tests.parallel.engine.cases import plan

DATA = TensorDataset(torch.randn(2, 4), torch.randn(2, 4))
HELD: dict[str, Any] = {}
SHARDED, STAGES, COPIES = plan(dp_shard=2), plan(pp=2), plan(dp_replicate=2)


class Holding(nn.Sequential):
    """Two layers, and something that it holds of the first, which takes part in `forward`."""

    def __init__(self, hold: Callable[[nn.Linear], Any], use: Callable[[Any], torch.Tensor]) -> None:
        super().__init__(nn.Linear(4, 4), nn.Tanh(), nn.Linear(4, 4))
        self.held, self.use = [hold(self[0])], use  # type: ignore[arg-type]

    def forward(self, inputs: torch.Tensor) -> torch.Tensor:
        outputs: torch.Tensor = super().forward(inputs) + self.use(self.held[0])
        return outputs


class Neighbour(nn.Linear):
    """A layer that reads the weight of another from its module, which it hides in a list."""

    def __init__(self, other: nn.Linear) -> None:
        super().__init__(4, 4)
        self.other = [other]

    def forward(self, inputs: torch.Tensor) -> torch.Tensor:
        return super().forward(inputs) + inputs @ self.other[0].weight


def plain() -> nn.Sequential:
    return nn.Sequential(nn.Linear(4, 4), nn.Tanh(), nn.Linear(4, 4))


def loss(outputs: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
    return nn.functional.mse_loss(outputs, targets)


def holding_loss(outputs: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
    return loss(outputs, targets) + HELD["weight"].square().sum()


def reading_loss(outputs: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
    return loss(outputs, targets) + HELD["model"][0].weight.square().sum()


def held_by_the_loss() -> nn.Module:
    HELD["model"] = model = plain()
    HELD["weight"] = model[0].weight
    return model


def with_hook(hook: Callable[[nn.Sequential], Callable[[torch.Tensor], Any]]) -> Callable[[], nn.Module]:
    def make() -> nn.Module:
        model = plain()
        model[0].weight.register_hook(hook(model))  # type: ignore[union-attr]
        return model

    return make


class Registering(nn.Sequential):
    """A model whose forward registers hooks."""

    def forward(self, inputs: torch.Tensor) -> torch.Tensor:
        self[0].weight.register_hook(lambda gradient: gradient.clamp(-1, 1))  # type: ignore[union-attr]
        outputs: torch.Tensor = super().forward(inputs)
        return outputs


def neighbours() -> nn.Module:
    first = nn.Linear(4, 4)
    return nn.Sequential(first, nn.Tanh(), Neighbour(first))


def recurrent() -> nn.Module:
    class Last(nn.Module):
        def forward(self, outputs: Any) -> torch.Tensor:
            last: torch.Tensor = outputs[0]
            return last

    return nn.Sequential(nn.GRU(4, 4), Last(), nn.Linear(4, 4))


CASES: dict[str, tuple[Callable[[], nn.Module], Any, Plan, str]] = {
    "an object": (
        lambda: Holding(lambda layer: layer.weight, torch.sum),
        loss,
        SHARDED,
        "0.weight: the model, the loss",
    ),
    "a weak reference": (
        lambda: Holding(lambda layer: weakref.ref(layer.bias), lambda of: of().sum()),
        loss,
        SHARDED,
        "0.bias: the model",
    ),
    "a view": (lambda: Holding(lambda layer: layer.weight.view(-1), torch.sum), loss, SHARDED, "0.weight: the model"),
    "a closure": (lambda: Holding(lambda layer: lambda: layer.weight, lambda of: of().sum()), loss, SHARDED, ""),
    "a copy": (lambda: Holding(lambda layer: layer.weight.detach().clone(), torch.sum), loss, SHARDED, ""),
    "an object, copies of the model": (lambda: Holding(lambda layer: layer.weight, torch.sum), loss, COPIES, ""),
    "an object of the loss": (held_by_the_loss, holding_loss, SHARDED, "0.weight: the model, the loss"),
    "a module of the loss": (held_by_the_loss, reading_loss, SHARDED, ""),
    "a module of the loss, in stages": (held_by_the_loss, reading_loss, STAGES, "0.weight: another stage"),
    "a hook on its own": (with_hook(lambda model: lambda g: g * (model[0].weight != 0)), loss, SHARDED, ""),
    "a hook on another's": (
        with_hook(lambda model: lambda g, other=model[2].weight: g + other),
        loss,
        SHARDED,
        "2.weight: the model, the loss",
    ),
    "a hook that draws": (
        with_hook(lambda _: lambda g: g + torch.randn_like(g)),
        loss,
        SHARDED,
        "0.weight: a hook draws",
    ),
    "a neighbour": (neighbours, loss, SHARDED, ""),
    "a neighbour in stages": (neighbours, loss, STAGES, "0.weight: another stage of the pipeline"),
    "a list that its module keeps": (recurrent, loss, SHARDED, ""),
    "hooks of a pass": (lambda: Registering(*plain()), loss, SHARDED, "0.weight: a forward pass registers a hook"),
    "plain": (plain, loss, STAGES, ""),
}


@pytest.mark.parametrize("device", ["cpu", "meta"])
@pytest.mark.parametrize("name", CASES)
def test_what_is_held_is_named(name: str, device: str) -> None:
    make, of_task, chosen, words = CASES[name]
    if (name, device) == ("a hook that draws", "meta"):
        words = ""  # nothing is drawn there: the first step refuses it
    with torch.device(device):
        model = make()
        before = dict(model.named_parameters())
        task = Task(model=make, data=lambda site, split: DATA, loss=of_task)
        faults = [*references(MeshWay(task, chosen, 0, DATA, model))]
    assert len(faults) == bool(words), faults
    assert all(words in fault for fault in faults)
    assert {name: id(p) for name, p in before.items()} == {name: id(p) for name, p in model.named_parameters()}
