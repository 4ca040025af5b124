"""Weights that are fractions: in every engine one step of the weighted mean, whatever factor all of them have."""

from typing import Any

import numpy as np
import pytest
import torch
from torch import nn
from torch.utils.data import TensorDataset

import atoll
from atoll.task.array_task import Trained
from atoll.task.local import Local
from atoll.task.task import Task

ROWS = {"large": (8, 0), "small": (2, 1)}


class Scaled(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.w = nn.Parameter(torch.zeros(2))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x * self.w


def data(site: str, split: str) -> Any:
    rows, label = ROWS[site]
    return TensorDataset(torch.ones(rows, 2), torch.full((rows,), label)) if split == "train" else None


def of_factor(factor: float, **options: Any) -> Task:
    """A step of one half toward each site's class, so w[0] = .8 / 2 - .2 / 2, as class weights are alike."""
    classes = torch.tensor([factor, factor], dtype=torch.float32)
    return Task(
        model=Scaled,
        data=data,
        loss=lambda outputs, targets: nn.functional.cross_entropy(outputs, targets, weight=classes),
        units=lambda targets: classes[targets].sum(),
        sites=[*ROWS],
        local=Local(batch_size=None, lr=1.0),
        **options,
    )


class InArrays:
    """The same in arrays: the sum of a site's weights is the number of its examples times the factor."""

    sites = tuple(ROWS)

    def __init__(self, factor: float) -> None:
        self.factor = factor

    def initial(self, seed: int) -> Any:
        return {"w": np.zeros(2, np.float32)}

    def train(self, parameters: Any, instructions: Any) -> Trained:
        rows, label = ROWS[instructions.site]
        return Trained({"w": np.float32([0.5, -0.5] if label == 0 else [-0.5, 0.5])}, rows * self.factor)


def trained(task: Any, engine: str, **settings: Any) -> Any:
    chosen = {"round.cohort_size": 2, "simulation.engine": engine, **settings}
    return atoll.simulate(task, rounds=1, progress=False, set=chosen).model()["w"]


@pytest.mark.parametrize("factor", [1e-12, 0.01, 0.3, 1, 1e5])
def test_units_that_are_fractions_weigh_by_their_ratio(factor: float) -> None:
    for engine in ("sequential", "batched"):
        assert trained(of_factor(factor), engine) == pytest.approx([0.3, -0.3], rel=1e-6)
    assert trained(InArrays(factor), "sequential") == pytest.approx([0.3, -0.3], rel=1e-6)


def test_fractions_weigh_so_under_fednova() -> None:
    assert trained(of_factor(0.01), "sequential", **{"aggregation.algorithm": "fednova"})[0] == pytest.approx(0.3)


def test_a_weight_that_nothing_carries_is_refused_by_name() -> None:
    with pytest.raises(atoll.AtollError, match=r"must be in 1e-30\.\.9007199254740992, got 8e-33: scale task\.units"):
        trained(of_factor(1e-33), "sequential")
