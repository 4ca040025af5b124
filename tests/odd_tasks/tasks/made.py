"""Models whose parameters come to be in other ways than by the constructors of layers, or with something attached."""

import copy
import io
from collections.abc import Callable
from typing import Any

import torch
from torch import nn

from tests.odd_tasks.tasks.base import CLASSES, FEATURES, IN_ORDER, layers, of_model


def row() -> nn.Module:
    layer = nn.Sequential(nn.Linear(FEATURES, FEATURES), nn.Tanh())
    return nn.Sequential(*(copy.deepcopy(layer) for _ in range(3)), nn.Linear(FEATURES, CLASSES))


class WithReference(nn.Module):
    """A policy, and a frozen copy of it as the reference."""

    def __init__(self) -> None:
        super().__init__()
        self.policy = layers()
        self.reference = copy.deepcopy(self.policy).requires_grad_(False)

    def forward(self, inputs: torch.Tensor) -> torch.Tensor:
        outputs: torch.Tensor = self.policy(inputs) - self.reference(inputs)
        return outputs


class Encoded(nn.Module):
    """Torch's encoder, whose layers are copies, over the features as words."""

    def __init__(self) -> None:
        super().__init__()
        layer = nn.TransformerEncoderLayer(4, 2, 8, dropout=0.0, batch_first=True)
        self.enter, self.encoder = nn.Linear(1, 4), nn.TransformerEncoder(layer, 2, enable_nested_tensor=False)
        self.leave = nn.Linear(4, CLASSES)

    def forward(self, inputs: torch.Tensor) -> torch.Tensor:
        outputs: torch.Tensor = self.leave(self.encoder(self.enter(inputs[..., None])).mean(1))
        return outputs


class Written(nn.Module):
    """A parameter that was written past its module, and one that was a buffer."""

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("table", torch.randn(8, FEATURES) / 3)
        self._parameters["first"] = nn.Parameter(self.get_buffer("table").clone())
        del self.table
        self.last = nn.Linear(8, CLASSES)

    def forward(self, inputs: torch.Tensor) -> torch.Tensor:
        outputs: torch.Tensor = self.last(torch.tanh(inputs @ self.first.t()))
        return outputs


class Image(nn.Module):
    """The features as an image of 2 x 3."""

    def forward(self, inputs: torch.Tensor) -> torch.Tensor:
        return inputs.view(-1, 1, 2, 3)


def channels_last() -> nn.Module:
    model = nn.Sequential(Image(), nn.Conv2d(1, 4, 2), nn.Tanh(), nn.Conv2d(4, CLASSES, (1, 2)), nn.Flatten())
    return model.to(memory_format=torch.channels_last)


def unpickled() -> nn.Module:
    file = io.BytesIO()
    torch.save(layers(), file)
    file.seek(0)
    model = torch.load(file, weights_only=False)
    assert isinstance(model, nn.Module)
    return model


def assigned() -> nn.Module:
    model = layers()
    model.load_state_dict({name: tensor * 0.5 for name, tensor in model.state_dict().items()}, assign=True)
    return model


def tied_late() -> nn.Module:
    model = nn.Sequential(nn.Linear(FEATURES, FEATURES), nn.Tanh(), nn.Linear(FEATURES, FEATURES), row())
    model[2].weight = model[0].weight
    return model


def hooked(attach: Callable[[nn.Linear], object]) -> Any:
    def make() -> nn.Module:
        model = layers()
        attach(model[0])  # type: ignore[arg-type]
        return model

    return of_model(make, local=IN_ORDER)


def _project(weight: torch.Tensor) -> None:
    assert weight.grad is not None
    weight.grad.clamp_(-0.02, 0.02)
    weight.grad[:, 0] = 0


def reversed_layers() -> nn.Module:
    model = layers()
    model[2].register_full_backward_pre_hook(lambda _module, given: (-given[0],))
    return model


class Scaling(nn.Linear):
    """A layer whose forward reads an attribute of its weight."""

    def forward(self, inputs: torch.Tensor) -> torch.Tensor:
        return super().forward(inputs) * self.weight.scale  # type: ignore[operator]


def with_attribute() -> nn.Module:
    model = nn.Sequential(nn.Linear(FEATURES, 8), nn.Tanh(), Scaling(8, CLASSES))
    model[2].weight.scale = 1.5  # type: ignore[union-attr, assignment]
    return model


class Holding(nn.Module):
    """A model that keeps its weights in a list, too."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = layers()
        self.weights = [[layer.weight] for layer in self.layers if isinstance(layer, nn.Linear)]

    def forward(self, inputs: torch.Tensor) -> torch.Tensor:
        penalty = sum(weight.square().mean() for (weight,) in self.weights)
        outputs: torch.Tensor = self.layers(inputs) * (1 - penalty)
        return outputs


copied_layers = of_model(row)
frozen_reference = of_model(WithReference)
encoder_of_copies = of_model(Encoded)
written_parameters = of_model(Written)
channels_last_layers = of_model(channels_last)
unpickled_layers = of_model(unpickled)
assigned_values = of_model(assigned)
tied_after = of_model(tied_late)
masked_gradient = hooked(lambda layer: layer.weight.register_hook(lambda g: torch.zeros_like(g)))
clamped_gradient = hooked(lambda layer: layer.weight.register_hook(lambda g: g.clamp(-0.02, 0.02)))
decaying_gradient = hooked(lambda layer: layer.bias.register_hook(lambda g: g + 0.3 * layer.bias.detach()))
projected_gradient = hooked(lambda layer: layer.weight.register_post_accumulate_grad_hook(_project))
reversed_gradient = of_model(reversed_layers)
weight_attribute = of_model(with_attribute)
held_weights = of_model(Holding)
