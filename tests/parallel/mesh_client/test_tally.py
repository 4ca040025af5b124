"""The sums that a training on a mesh leaves of its losses: weighted by the examples that the batch knows."""

from dataclasses import replace
from typing import Any

import pytest
import torch

from atoll.parallel.checkpoint.ranks import Ranks
from atoll.parallel.data.batch import Batch
from atoll.parallel.engine.microbatches import split
from atoll.parallel.engine.passes import share_of_loss
from atoll.parallel.engine.plan import Plan
from atoll.parallel.mesh_client.tally import Tally
from atoll.training.data.units import units_of
from tests.parallel.mesh_client import tasks

BOXES = [torch.ones(3, 2), torch.ones(1, 2), torch.ones(2, 2)]


def of_dict(outputs: torch.Tensor, targets: Any) -> torch.Tensor:
    return (outputs - targets["y"]).square().mean()


def of_list(outputs: torch.Tensor, targets: Any) -> torch.Tensor:
    return torch.stack([(out - boxes).square().mean() for out, boxes in zip(outputs, targets, strict=True)]).mean()


@pytest.mark.parametrize("units", [None, "sum"])
@pytest.mark.parametrize("number", [1, 2])
@pytest.mark.parametrize(
    ("loss", "inputs", "targets"),
    [
        pytest.param(
            of_dict, torch.ones(3), {"one for all": torch.ones(1), "y": torch.zeros(3)}, id="a constant first"
        ),
        pytest.param(of_list, torch.zeros(3), BOXES, id="a list whose first entry has as many rows"),
    ],
)
def test_each_loss_has_the_weight_of_its_examples(
    loss: Any, inputs: torch.Tensor, targets: Any, number: int, units: str | None
) -> None:
    """All examples have the same loss; the device reads it once."""
    task = replace(tasks.task, loss=loss, units=units, metrics={})
    tally = Tally(task, Plan(), None, Ranks())
    batch = Batch.of((inputs, targets), units_of(task), 3, is_filler=False, may_list=True)
    leaf = torch.zeros((), requires_grad=True)
    for micro in split(batch, number):
        share_of_loss(tally, micro.inputs + leaf, micro, lambda: 3)
    counted = 3.0
    of_all = 3.0 if units is None else float(number)
    assert tally.state()["sums"]["loss"] == pytest.approx((of_all, counted))
