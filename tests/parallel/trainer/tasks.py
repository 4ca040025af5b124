"""Small tasks that train in a second, and some that go wrong."""

import os
import time
from collections import defaultdict
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from torch import nn
from torch.utils.data import TensorDataset

from atoll import Local, Metric, Task

SITES = {"north": 23, "south": 29}
"""Training examples of each site: 52 in all, so that the last of 7 batches of 8 has 4."""


def load_site(site: str, split: str) -> TensorDataset | None:
    """Points, and on which side of a plane they lie; the south has no test data."""
    if split == "test" and site == "south":
        return None
    generator = torch.Generator().manual_seed(len(site) + ord(site[0]) + (split == "test"))
    points = torch.randn(SITES[site] if split == "train" else 13, 6, generator=generator)
    return TensorDataset(points, (points.sum(dim=1) > 0).long())


def load_test() -> TensorDataset:
    points = torch.randn(9, 6, generator=torch.Generator().manual_seed(5))
    return TensorDataset(points, (points.sum(dim=1) > 0).long())


def make_model() -> nn.Module:
    return nn.Sequential(nn.Linear(6, 12), nn.Tanh(), nn.Linear(12, 12), nn.Tanh(), nn.Linear(12, 2))


def accuracy(outputs: torch.Tensor, targets: torch.Tensor) -> tuple[Any, int]:
    return (outputs.argmax(dim=1) == targets).sum(), len(targets)


def agreement(outputs: torch.Tensor, targets: torch.Tensor) -> tuple[Any, Any, int]:
    """Three sums, of which a value is more than a quotient."""
    right = outputs.argmax(dim=1) == targets
    return right.sum(), targets.sum(), len(targets)


task = Task(
    model=make_model,
    data=load_site,
    sites=list(SITES),
    loss=nn.functional.cross_entropy,
    metrics={"accuracy": accuracy, "agreement": Metric(agreement, lambda s: s[0] / s[2] - s[1] / s[2])},
    local=Local(epochs=4, batch_size=8, lr=0.2, momentum=0.5),
    test_data=load_test,
)

with_dropout = replace(task, model=lambda: nn.Sequential(nn.Linear(6, 12), nn.Dropout(0.3), nn.Linear(12, 2)))


MASKS: defaultdict[int, list[bytes]] = defaultdict(list)
"""The dropout masks of each layer of `dropping` in this process."""


class Dropping(nn.Module):
    """A layer with a dropout whose masks are kept."""

    def __init__(self, number: int) -> None:
        super().__init__()
        self.number, self.layer = number, nn.Linear(6, 6)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Map (B, 6) to (B, 6)."""
        mask = nn.functional.dropout(torch.ones(32, device=x.device), 0.5, self.training)
        if self.training and torch.is_grad_enabled() and not x.is_meta:
            MASKS[self.number].append(mask.bool().numpy().tobytes())
        found: torch.Tensor = x + self.layer(x) * mask.mean()
        return found


dropping = replace(task, model=lambda: nn.Sequential(*map(Dropping, range(5)), nn.Linear(6, 2)))


class Gain(nn.Module):
    """A layer with a scalar and a transposed weight."""

    def __init__(self) -> None:
        super().__init__()
        self.gain = nn.Parameter(torch.tensor(0.8))
        self.weight = nn.Parameter(torch.randn(12, 6).t() / 3)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Map (B, 6) to (B, 12)."""
        return (x @ self.weight).tanh() * self.gain


def odd_model() -> nn.Module:
    return nn.Sequential(Gain(), nn.Linear(12, 12), nn.Tanh(), nn.Linear(12, 2))


odd = replace(task, model=odd_model)


class Clamped(nn.Module):
    """A layer whose weight stays positive, by the old idiom."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(6, 12)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Map (B, 6) to (B, 12)."""
        self.layer.weight.data.clamp_(min=0.01)
        found: torch.Tensor = self.layer(x)
        return found


clamped = replace(task, model=lambda: nn.Sequential(Clamped(), nn.Linear(12, 2)))


class Scaled(nn.Module):
    """Inputs times a buffer, which may start with a number that no model's file holds."""

    def __init__(self, largest: float) -> None:
        super().__init__()
        self.register_buffer("scale", torch.tensor([largest, *[1.0] * 5], dtype=torch.float64))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x * self.scale.to(x.dtype)


infinite, too_large = (
    replace(task, model=lambda largest=largest: nn.Sequential(Scaled(largest), nn.Linear(6, 12), nn.Linear(12, 2)))
    for largest in (float("inf"), 1e300)
)

in_order = replace(task, local=replace(task.local, shuffle=False))


SLOWED_BY = "ATOLL_TEST_SLOWED_BY"
"""The variable that names a file: the task `slow` sleeps in each step while the file exists."""


def slow_loss(outputs: Any, targets: Any) -> torch.Tensor:
    """Sleep, so that a signal arrives in the middle of a training; in all steps alike, as ranks vote by their pace."""
    if os.path.exists(os.environ.get(SLOWED_BY, "")):
        time.sleep(0.15)
    return nn.functional.cross_entropy(outputs, targets)


slow = replace(task, loss=slow_loss)


class Breaking:
    """A loss that goes wrong in one forward pass."""

    def __init__(self, at: int, rank: str | None = None) -> None:
        self.at, self.rank, self.calls = at, rank, 0

    def __call__(self, outputs: Any, targets: Any) -> torch.Tensor:
        self.calls += 1
        loss = nn.functional.cross_entropy(outputs, targets)
        if self.calls < self.at or self.rank not in (None, os.environ.get("RANK")):
            return loss
        if self.rank is not None:
            raise ArithmeticError(f"no loss on rank {self.rank}")
        return loss * float("nan")


failing = replace(task, loss=Breaking(6, rank="1"))


def losses(folder: Path) -> dict[int, float]:
    """Return the losses of the log by step."""
    from atoll.parallel.trainer.logs import read_log

    return {step: event["loss"] for step, event in read_log(folder / "log.jsonl", "step").items()}
