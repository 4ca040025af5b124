"""Recomputation gives the gradients of a plain loop, whatever a block draws, counts or moves; or it is refused."""

import random
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from torch import nn
from torch.nn.utils import parametrizations

from atoll.parallel.engine.recompute import recompute
from atoll.parallel.engine.repetition import NotRepeatable

STEPS = 6
counted = [0]


class Moving(nn.Module):
    """A block whose pass depends on something that it moves."""

    def __init__(self, kind: str) -> None:
        super().__init__()
        self.kind = kind
        self.a, self.b = nn.Linear(8, 8), parametrizations.spectral_norm(nn.Linear(8, 8))
        self.norm = nn.BatchNorm1d(8, momentum=None)
        self.calls, self.factors, self.kept = 0, [1.0], SimpleNamespace(calls=0)
        self.generator = torch.Generator().manual_seed(3)
        self.of_numpy, self.of_python = np.random.default_rng(1), random.Random(2)
        self.centre = torch.zeros(8)
        self.register_buffer("sums", torch.ones(8))
        self.register_buffer("passing", torch.ones(8), persistent=False)

    def factor(self, h: torch.Tensor) -> torch.Tensor | float:  # noqa: C901
        match self.kind:
            case "numpy":
                return float(np.random.uniform(0.2, 2.0))
            case "python":
                return random.uniform(0.2, 2.0)
            case "torch":
                return torch.rand(())
            case "generator":
                return torch.rand((), generator=self.generator)
            case "numpy generator":
                return float(self.of_numpy.uniform())
            case "python generator":
                return self.of_python.random()
            case "counter":
                self.calls += 1
                return 1 / self.calls
            case "list":
                self.factors.append(self.factors[-1] / 2)
                return self.factors[-1]
            case "object":
                self.kept.calls += 1
                return 1 / self.kept.calls
            case "attribute":
                self.centre = 0.5 * self.centre + h.detach().mean(0)
                return self.centre
            case "sums":
                return self.get_buffer("sums").add_(h.detach().mean(0)).clone()
            case "passing":
                return self.get_buffer("passing").mul_(0.5).clone()
            case "outside":
                counted[0] += 1
                return 1 / counted[0]
        return 1.0

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        h = torch.tanh(self.a(x))
        outputs: torch.Tensor = x + self.norm(torch.tanh(self.b(h * self.factor(h))))
        return outputs


def trained(kind: str, recomputed: str | None) -> dict[str, torch.Tensor]:
    """Return the parameters and buffers after some steps."""
    counted[0] = 0
    torch.manual_seed(0)
    np.random.seed(0)
    random.seed(0)
    blocks = nn.ModuleList([Moving(kind) for _ in range(2)])
    optimizer = torch.optim.SGD(blocks.parameters(), 0.1)
    for name, block in blocks.named_children() if recomputed else ():
        recompute(block, recomputed or "", name=name)
    inputs = torch.randn(4, 8)
    for _ in range(STEPS):
        optimizer.zero_grad()
        hidden = inputs
        for block in blocks:
            hidden = block(hidden)
        hidden.square().mean().backward()  # type: ignore[no-untyped-call]
        optimizer.step()
    drawn = {"drawn": torch.tensor([random.random(), np.random.uniform(), float(torch.rand(()))])}
    return {name: tensor.detach().clone() for name, tensor in blocks.state_dict().items()} | drawn


@pytest.mark.parametrize("recomputed", ["full", "selective"])
@pytest.mark.parametrize(
    "kind",
    [
        *("nothing", "numpy", "python", "torch", "generator", "numpy generator", "python generator"),
        *("counter", "list", "object", "attribute", "sums", "passing"),
    ],
)
def test_a_block_is_repeated_from_where_it_began(kind: str, recomputed: str) -> None:
    for one, other in zip(trained(kind, None).items(), trained(kind, recomputed).items(), strict=True):
        assert one[0] == other[0]
        torch.testing.assert_close(other[1], one[1], rtol=0, atol=0)


@pytest.mark.parametrize("recomputed", ["full", "selective"])
def test_a_block_that_moves_something_outside_of_its_modules_is_refused_by_name(recomputed: str) -> None:
    with pytest.raises(NotRepeatable, match=r"plan.recompute: [01] gives other outputs when it is computed again"):
        trained("outside", recomputed)
