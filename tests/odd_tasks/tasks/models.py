"""Models of odd structure, and odd outputs."""

from dataclasses import dataclass
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import nn
from torch.nn.utils import parametrizations

from tests.odd_tasks.tasks.base import CLASSES, FEATURES, IN_ORDER, layers, of_model

F = nn.functional


class Tied(nn.Module):
    """A layer whose weight is used twice; as one parameter, or as two that are views of one memory."""

    def __init__(self, *, by_view: bool = False) -> None:
        super().__init__()
        self.enter, self.back = nn.Linear(FEATURES, FEATURES), nn.Linear(FEATURES, FEATURES)
        self.back.weight = nn.Parameter(self.enter.weight.detach().t()) if by_view else self.enter.weight
        self.last = nn.Linear(FEATURES, CLASSES)

    def forward(self, inputs: torch.Tensor) -> torch.Tensor:
        return self.last(torch.tanh(self.back(torch.tanh(self.enter(inputs)))))


def frozen(*, everything: bool = False) -> nn.Module:
    model = layers()
    (model if everything else model[0]).requires_grad_(False)
    return model


class Experts(nn.Module):
    """Each row goes to the expert of the sign of its first feature; the third is never called."""

    def __init__(self) -> None:
        super().__init__()
        self.experts = nn.ModuleList(nn.Linear(FEATURES, CLASSES) for _ in range(3))

    def forward(self, inputs: torch.Tensor) -> torch.Tensor:
        outputs = inputs.new_zeros(len(inputs), CLASSES)
        for number, expert in enumerate(self.experts):
            (chosen,) = ((inputs[:, 0] > 0).long() == number).nonzero(as_tuple=True)
            if len(chosen):
                outputs = outputs.index_add(0, chosen, expert(inputs[chosen]))
        return outputs


class Again(nn.Module):
    """A layer that is called again and again."""

    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(nn.Linear(FEATURES, FEATURES) for _ in range(2))
        self.last = nn.Linear(FEATURES, CLASSES)

    def forward(self, inputs: torch.Tensor) -> torch.Tensor:
        for number in (0, 1, 0, 0):
            inputs = torch.tanh(self.blocks[number](inputs))
        return self.last(inputs)


class Borrowing(nn.Module):
    """A weight that is used outside of its layer, and a penalty and a parameter among the outputs."""

    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(nn.Linear(FEATURES, FEATURES) for _ in range(2))
        self.last, self.weights = nn.Linear(FEATURES, CLASSES), nn.Parameter(torch.ones(2))

    def forward(self, inputs: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        weight = self.blocks[0].get_parameter("weight")
        hidden = torch.tanh(self.blocks[1](F.linear(inputs, weight / weight.norm())))
        return self.last(hidden), weight.square().sum().expand(len(inputs)), self.weights


def borrowing_loss(outputs: tuple[torch.Tensor, ...], targets: torch.Tensor) -> torch.Tensor:
    logits, penalty, weights = outputs
    return weights[0] * F.cross_entropy(logits, targets) + weights[1].square() * 0.1 + 0.01 * penalty.mean()


@dataclass
class Answer:
    logits: torch.Tensor
    hidden: torch.Tensor | None = None


class Pair(NamedTuple):
    logits: torch.Tensor
    hidden: torch.Tensor


class Mapped(dict[str, Any]):
    """A mapping whose items are attributes, too, as the outputs of Hugging Face's models are."""

    def __getattr__(self, name: str) -> Any:
        return self[name]


class Answering(nn.Module):
    def __init__(self, kind: str) -> None:
        super().__init__()
        self.first, self.last, self.kind = nn.Linear(FEATURES, 8), nn.Linear(8, CLASSES), kind

    def forward(self, inputs: torch.Tensor) -> Any:
        hidden = torch.tanh(self.first(inputs))
        logits = self.last(hidden)
        makers: dict[str, Any] = {
            "dataclass": lambda: Answer(logits),
            "named tuple": lambda: Pair(logits, hidden),
            "mapping": lambda: Mapped(logits=logits),
        }
        return makers[self.kind]()


class Recurrent(nn.Module):
    """A GRU over the features."""

    def __init__(self) -> None:
        super().__init__()
        self.cell, self.last = nn.GRU(1, 5, batch_first=True), nn.Linear(5, CLASSES)

    def forward(self, inputs: torch.Tensor) -> torch.Tensor:
        return self.last(self.cell(inputs[:, :, None])[0][:, -1])


class Attending(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.enter = nn.Linear(1, 4)
        self.layer = nn.TransformerEncoderLayer(4, 2, 8, dropout=0.0, batch_first=True)
        self.last = nn.Linear(4, CLASSES)

    def forward(self, inputs: torch.Tensor) -> torch.Tensor:
        return self.last(self.layer(self.enter(inputs[:, :, None])).mean(1))


class Skipping(nn.Sequential):
    """A Sequential with a forward pass of its own."""

    def forward(self, inputs: torch.Tensor) -> torch.Tensor:
        return inputs[:, :CLASSES] + super().forward(inputs)


def drawn_by_numpy() -> nn.Module:
    model = layers()
    with torch.no_grad():
        model[0].weight.copy_(torch.from_numpy(np.random.randn(8, FEATURES)))
    return model


class Clamped(nn.Linear):
    """A weight that the forward pass clamps in place."""

    def __init__(self) -> None:
        super().__init__(FEATURES, CLASSES)

    def forward(self, inputs: torch.Tensor) -> torch.Tensor:
        with torch.no_grad():
            self.weight.clamp_(-0.2, 0.2)
        return super().forward(inputs)


class OneNumber(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.number = nn.Parameter(torch.tensor(0.1))

    def forward(self, inputs: torch.Tensor) -> torch.Tensor:
        return inputs[:, :CLASSES] * self.number


def of_logits(outputs: Any, targets: torch.Tensor) -> torch.Tensor:
    return F.cross_entropy(outputs.logits, targets)


tied = of_model(Tied)
tied_by_views = of_model(lambda: Tied(by_view=True))
frozen_layer = of_model(frozen)
all_frozen = of_model(lambda: frozen(everything=True))
routed_experts = of_model(Experts)
called_again = of_model(Again)
borrowed_weights = of_model(Borrowing, loss=borrowing_loss, units=len)
returns_dataclass = of_model(lambda: Answering("dataclass"), loss=of_logits)
returns_named_tuple = of_model(lambda: Answering("named tuple"), loss=of_logits)
returns_mapping = of_model(lambda: Answering("mapping"), loss=of_logits)
recurrent = of_model(Recurrent)
attention = of_model(Attending)
own_sequential = of_model(lambda: Skipping(nn.Linear(FEATURES, 8), nn.Tanh(), nn.Linear(8, CLASSES)))
weight_norm = of_model(lambda: nn.Sequential(parametrizations.weight_norm(nn.Linear(FEATURES, CLASSES))))
spectral_norm = of_model(
    lambda: nn.Sequential(parametrizations.spectral_norm(nn.Linear(FEATURES, CLASSES))), local=IN_ORDER
)
numpy_weights = of_model(drawn_by_numpy)
clamped = of_model(Clamped)
one_number = of_model(OneNumber)
large = of_model(lambda: nn.Sequential(nn.Linear(FEATURES, 2**17), nn.ReLU(), nn.Linear(2**17, CLASSES)))
no_module = of_model(lambda: 3)  # type: ignore[arg-type, return-value]
