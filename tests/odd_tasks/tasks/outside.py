"""State and references outside of parameters: sums in buffers, counts on modules, hooks, a held weight."""

import torch
from torch import nn

from tests.odd_tasks.tasks.base import FEATURES, IN_ORDER, layers, of_model

F = nn.functional


class Welford(nn.Module):
    """A normalization that counts and sums all rows that it has seen, in buffers."""

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("count", torch.zeros((), dtype=torch.long))
        self.register_buffer("mean", torch.zeros(FEATURES))
        self.body = layers()

    def forward(self, inputs: torch.Tensor) -> torch.Tensor:
        if self.training:
            with torch.no_grad():
                total = self.count + len(inputs)
                self.mean.add_((inputs.mean(0) - self.mean) * len(inputs) / total)
                self.count.copy_(total)
        return self.body(inputs - self.mean)


class Cooling(nn.Module):
    """A temperature that falls with each pass: a number, no buffer."""

    def __init__(self) -> None:
        super().__init__()
        self.body, self.passes = layers(), 0

    def forward(self, inputs: torch.Tensor) -> torch.Tensor:
        self.passes += self.training
        return self.body(inputs) / max(1, self.passes)


class OfWeights:
    """A loss that holds the weight of the newest model, and adds its norm."""

    def __init__(self) -> None:
        self.weight: nn.Parameter | None = None

    def model(self) -> nn.Module:
        made = layers()
        self.weight = made[0].weight
        return made

    def __call__(self, outputs: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
        assert self.weight is not None
        return F.cross_entropy(outputs, targets) + 0.1 * self.weight.square().sum()


def hooked() -> nn.Module:
    model = layers()
    model[0].register_forward_hook(lambda _module, _given, out: 0.5 * out)
    model[2].register_forward_pre_hook(lambda _module, given: (given[0] + 1.0,))
    return model


penalty = OfWeights()

running_sums = of_model(Welford, local=IN_ORDER)
counting_passes = of_model(Cooling, local=IN_ORDER)
weight_in_the_loss = of_model(penalty.model, loss=penalty)
forward_hooks = of_model(hooked)
