"""Models of which a rank calls what its examples ask for, and the batches that make the ranks differ."""

from functools import cache
from typing import Any

import torch
from torch import nn

from atoll.parallel.engine.assemble import assemble
from atoll.parallel.engine.axes import Axes
from atoll.parallel.engine.optimization import Optimization
from atoll.parallel.engine.plan import Plan
from atoll.parallel.engine.sharding import whole
from tests.parallel.engine import reference
from tests.parallel.engine.cases import mine
from tests.parallel.engine.reference import Trace

NUM_EXPERTS = 4

ROUTES = ((0, 1, 2, 3), (0, 0, 1, 1), (0, 1, 0, 1), (3, 3, 3, 0), (2, 2, 2, 2), (0, 1, 2, 3), (1, 1, 3, 3))
"""The expert of each quarter of a batch's examples; from the second on, no rank of two or four uses all."""


def batches() -> list[tuple[Any, Any]]:
    generator = torch.Generator().manual_seed(3)
    found = []
    for route in ROUTES:
        inputs = torch.randn(16, 5, generator=generator)
        inputs[:, 0] = torch.tensor(route).repeat_interleave(4)
        found.append((inputs, torch.randint(0, 3, (16,), generator=generator)))
    inputs, targets = found[1]
    found.append((inputs[-1:], targets[-1:]))  # the other ranks have none
    return found


class Experts(nn.Module):
    """Experts that are blocks themselves."""

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Linear(5, 8)
        self.experts = nn.ModuleList(nn.Linear(8, 8) for _ in range(NUM_EXPERTS))
        self.last = nn.Linear(8, 3)

    def forward(self, inputs: torch.Tensor) -> torch.Tensor:
        hidden = torch.tanh(self.first(inputs))
        return self.last(hidden + routed(self.experts, hidden, inputs[:, 0].long()))


def routed(experts: nn.ModuleList, hidden: torch.Tensor, route: torch.Tensor) -> torch.Tensor:
    outputs = torch.zeros_like(hidden)
    for index, expert in enumerate(experts):
        rows = (route == index).nonzero().squeeze(1)
        if len(rows):
            outputs = outputs.index_add(0, rows, expert(hidden[rows]).to(outputs.dtype))
    return outputs


class Layer(nn.Module):
    """A layer with a router of its own: all ranks call it, with other experts."""

    def __init__(self, shift: int) -> None:
        super().__init__()
        self.shift = shift
        self.experts = nn.ModuleList(nn.Linear(5, 5) for _ in range(NUM_EXPERTS))

    def forward(self, inputs: torch.Tensor) -> torch.Tensor:
        route = (inputs[:, 0].round().long() + self.shift) % NUM_EXPERTS
        keep = torch.zeros(5)
        keep[0] = 1  # the route travels with the example
        return inputs + torch.tanh(routed(self.experts, inputs, route)) * (1 - keep)


class Backwards(Experts):
    """Experts that are called in another order than the model names them, and the more the higher their number."""

    def forward(self, inputs: torch.Tensor) -> torch.Tensor:
        hidden = torch.tanh(self.first(inputs))
        route = inputs[:, 0].long()
        for index in reversed(range(NUM_EXPERTS)):
            rows = (route == index).nonzero().squeeze(1)
            if len(rows):
                hidden = hidden.index_add(0, rows, self.experts[index](hidden[rows]).to(hidden.dtype))
        return self.last(hidden)


class Again(Experts):
    """A layer that is called as often as an example asks for, at most."""

    def forward(self, inputs: torch.Tensor) -> torch.Tensor:
        hidden = torch.tanh(self.first(inputs))
        for depth in range(int(inputs[:, 0].max()) + 1):
            deep = (inputs[:, :1] >= depth).to(hidden.dtype)
            hidden = hidden + deep * torch.tanh(self.experts[0](hidden))
        return self.last(hidden)


class Turns(Experts):
    """Layers that are called in the order and number that the examples ask for, some of them again and again."""

    def forward(self, inputs: torch.Tensor) -> torch.Tensor:
        hidden = torch.tanh(self.first(inputs))
        for index in sorted(set(inputs[:, 0].long().tolist()), key=lambda index: (index * 3) % 4):
            rows = (inputs[:, 0].long() == index).nonzero().squeeze(1)
            for number in (index, 2, index, 0):
                hidden = hidden.index_add(0, rows, torch.tanh(self.experts[number](hidden[rows])))
        return self.last(hidden)


def experts() -> nn.Module:
    torch.manual_seed(1)
    return Experts()


def backwards() -> nn.Module:
    torch.manual_seed(1)
    return Backwards()


def again() -> nn.Module:
    torch.manual_seed(1)
    return Again()


def turns() -> nn.Module:
    torch.manual_seed(1)
    return Turns()


def layers() -> nn.Module:
    torch.manual_seed(1)
    return nn.Sequential(Layer(0), Layer(1), Layer(3), nn.Linear(5, 3))


MODELS = {"experts": experts, "backwards": backwards, "again": again, "turns": turns, "layers": layers}


def train(model: str, plan: Plan, optimizer: str, clip_norm: float | None = None) -> Trace:
    """Train on this rank, and evaluate between the steps."""
    axes = Axes(plan.mesh, "cpu")
    engine = assemble(
        MODELS[model](),
        plan,
        Optimization(
            loss=nn.functional.cross_entropy,
            make_optimizer=lambda named: reference.make_optimizer(optimizer, named),
            clip_norm=clip_norm,
        ),
        axes=axes,
    )
    losses, norms = [], []
    for inputs, targets in batches():
        batch = mine(inputs, targets, axes)
        engine.evaluate(batch, lambda _outputs, _targets, _rows: None)
        measured = engine.step(batch)
        assert measured.grad_norm is not None
        losses.append(measured.loss.item())
        norms.append(measured.grad_norm.item())
    inner = [getattr(part, "module", part) for part in engine.parts]
    parameters = {name: whole(p.detach()).clone() for part in inner for name, p in part.named_parameters()}
    return Trace(losses, norms, parameters, {})


@cache  # the same for all plans
def expected(model: str, optimizer: str, clip_norm: float | None = None) -> Trace:
    """Return the plain loop's trace."""
    return reference.plain_training(
        MODELS[model](), nn.functional.cross_entropy, batches(), optimizer, clip_norm=clip_norm
    )
