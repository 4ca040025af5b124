"""Models that torch's own utilities have worked on, or whose forward computes gradients and calls itself."""

import warnings
from typing import Any

import torch
from torch import nn
from torch.nn.utils import parametrizations, parametrize, prune
from torch.optim.swa_utils import AveragedModel
from torch.utils.checkpoint import checkpoint

from tests.odd_tasks.tasks.base import CLASSES, FEATURES, IN_ORDER, layers, of_model


def of(work: Any) -> nn.Module:
    """Return the plain layers after some work on them."""
    model = layers()
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # old forms of torch's utilities
        work(model)
    return model


class Symmetric(nn.Module):
    """A parametrization with an inverse."""

    def forward(self, weight: torch.Tensor) -> torch.Tensor:
        return weight.tanh()

    def right_inverse(self, weight: torch.Tensor) -> torch.Tensor:
        return weight.clamp(-0.9, 0.9).atanh()


class Averaging(nn.Module):
    """A model beside a mean of its own weights, which its outputs are compared with."""

    def __init__(self) -> None:
        super().__init__()
        self.student = layers()
        self.teacher = AveragedModel(self.student).requires_grad_(False)

    def forward(self, inputs: torch.Tensor) -> torch.Tensor:
        outputs: torch.Tensor = self.student(inputs) + 0.5 * self.teacher(inputs)
        return outputs


class Called(nn.Module):
    """Layers that are called as a function of scaled weights."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = layers()

    def forward(self, inputs: torch.Tensor) -> torch.Tensor:
        scaled = {name: 0.5 * weight for name, weight in self.layers.named_parameters()}
        outputs: torch.Tensor = torch.func.functional_call(self.layers, scaled, (inputs,))
        return outputs


class Energy(nn.Module):
    """Outputs that are the gradient of an energy by the inputs."""

    def __init__(self) -> None:
        super().__init__()
        self.energy, self.last = nn.Sequential(nn.Linear(FEATURES, 8), nn.Tanh(), nn.Linear(8, 1)), layers()

    def forward(self, inputs: torch.Tensor) -> torch.Tensor:
        with torch.enable_grad():
            inputs = inputs.detach().requires_grad_()
            (slope,) = torch.autograd.grad(self.energy(inputs).sum(), inputs, create_graph=True)
        outputs: torch.Tensor = self.last(slope)
        return outputs


class Checkpointed(nn.Module):
    """Layers that forward itself recomputes."""

    def __init__(self, use_reentrant: bool) -> None:
        super().__init__()
        self.first, self.rest, self.use_reentrant = nn.Linear(FEATURES, 8), nn.Linear(8, CLASSES), use_reentrant

    def forward(self, inputs: torch.Tensor) -> torch.Tensor:
        hidden = torch.tanh(self.first(inputs))
        outputs: torch.Tensor = checkpoint(self.rest, hidden, use_reentrant=self.use_reentrant)
        return outputs


class Reversing(torch.autograd.Function):
    """The identity, whose gradient is the negative one."""

    @staticmethod
    def forward(_context: Any, inputs: torch.Tensor) -> torch.Tensor:
        return inputs.view_as(inputs)

    @staticmethod
    def backward(_context: Any, *gradients: torch.Tensor) -> torch.Tensor:
        return -0.5 * gradients[0]


class Adversarial(nn.Module):
    """Two heads, of which one sends the negative gradient back."""

    def __init__(self) -> None:
        super().__init__()
        self.body, self.head, self.other = nn.Linear(FEATURES, 8), nn.Linear(8, CLASSES), nn.Linear(8, CLASSES)

    def forward(self, inputs: torch.Tensor) -> torch.Tensor:
        hidden = torch.tanh(self.body(inputs))
        outputs: torch.Tensor = self.head(hidden) + self.other(Reversing.apply(hidden))  # type: ignore[no-untyped-call]
        return outputs


class Bounded(nn.Module):
    """Weights that forward bounds without a gradient."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = layers()

    def forward(self, inputs: torch.Tensor) -> torch.Tensor:
        with torch.no_grad():
            norm = self.layers[0].weight.norm()
        outputs: torch.Tensor = self.layers(inputs) / (1 + norm)
        return outputs


class Repeated(nn.Module):
    """A layer that is called until its outputs hardly move."""

    def __init__(self) -> None:
        super().__init__()
        self.cell, self.last = nn.Linear(FEATURES, FEATURES), nn.Linear(FEATURES, CLASSES)

    def forward(self, inputs: torch.Tensor) -> torch.Tensor:
        hidden = torch.zeros_like(inputs)
        for _ in range(5):
            hidden = torch.tanh(self.cell(hidden) + inputs)
        outputs: torch.Tensor = self.last(hidden)
        return outputs


class Pretrained(nn.Module):
    """A frozen table of given values beside a trained one, read by the signs of the features."""

    def __init__(self) -> None:
        super().__init__()
        self.table = nn.Embedding.from_pretrained(torch.randn(2, 4))
        self.tuned, self.last = nn.Embedding.from_pretrained(torch.randn(2, 4), freeze=False), nn.Linear(4, CLASSES)

    def forward(self, inputs: torch.Tensor) -> torch.Tensor:
        signs = (inputs > 0).long()
        outputs: torch.Tensor = self.last((self.table(signs) + self.tuned(signs)).mean(1))
        return outputs


def cut() -> nn.Module:
    """Return a model whose parameters are cut from one tensor, each with memory of its own."""
    model = layers()
    values = torch.randn(FEATURES * 8 + 8) / 3
    model[0].weight = nn.Parameter(values[: FEATURES * 8].view(8, FEATURES).clone())
    model[0].bias = nn.Parameter(values[FEATURES * 8 :].clone())
    return model


def scripted() -> nn.Module:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", DeprecationWarning)
        return torch.jit.script(layers())  # type: ignore[no-untyped-call,no-any-return]


pruned = of_model(lambda: of(lambda model: prune.random_unstructured(model[0], "weight", 0.3)), local=IN_ORDER)
old_weight_norm = of_model(lambda: of(lambda model: nn.utils.weight_norm(model[0])), local=IN_ORDER)
orthogonal = of_model(lambda: of(lambda model: parametrizations.orthogonal(model[0])), local=IN_ORDER)
parametrized = of_model(
    lambda: of(lambda model: parametrize.register_parametrization(model[0], "weight", Symmetric())), local=IN_ORDER
)
averaged_copy = of_model(Averaging, local=IN_ORDER)
functional_call = of_model(Called, local=IN_ORDER)
energy = of_model(Energy, local=IN_ORDER)
checkpointed = of_model(lambda: Checkpointed(False), local=IN_ORDER)
checkpointed_reentrant = of_model(lambda: Checkpointed(True), local=IN_ORDER)
adversarial = of_model(Adversarial, local=IN_ORDER)
reads_a_norm = of_model(Bounded, local=IN_ORDER)
repeated_cell = of_model(Repeated, local=IN_ORDER)
pretrained_table = of_model(Pretrained, local=IN_ORDER)
cut_from_one = of_model(cut, local=IN_ORDER)
jit_scripted = of_model(scripted, local=IN_ORDER)
