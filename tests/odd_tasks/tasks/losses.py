"""Odd losses, units and targets."""

from dataclasses import replace
from typing import Any

import torch
from torch import nn

from tests.odd_tasks.tasks.base import CLASSES, of_rows, plain

F = nn.functional
WEIGHTS = torch.tensor([1.0, 2.0, 4.0]) / 700  # the weight of a site is a fraction


def with_mask(inputs: torch.Tensor, targets: torch.Tensor) -> list[Any]:
    return [
        (x, {"label": y, "mask": torch.tensor(float(number % 3 > 0))})
        for number, (x, y) in enumerate(zip(inputs, targets, strict=True))
    ]


def masked(outputs: torch.Tensor, targets: dict[str, torch.Tensor]) -> torch.Tensor:
    each = F.cross_entropy(outputs, targets["label"], reduction="none")
    return (each * targets["mask"]).sum() / targets["mask"].sum()


def in_table(inputs: torch.Tensor, targets: torch.Tensor) -> list[Any]:
    return [(x, F.one_hot(y, CLASSES).float()) for x, y in zip(inputs, targets, strict=True)]


def sharpened(outputs: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
    outputs /= 0.5  # a temperature, in place
    return F.cross_entropy(outputs, targets)


sharpened_in_place = replace(plain, loss=sharpened)
masked_targets = of_rows(with_mask, loss=masked, units=lambda targets: targets["mask"].sum())
class_weights = replace(
    plain,
    loss=lambda outputs, targets: F.cross_entropy(outputs, targets, weight=WEIGHTS),
    units=lambda targets: WEIGHTS[targets].sum(),
)
padding_0 = replace(
    plain,
    loss=lambda outputs, targets: F.cross_entropy(outputs, targets, ignore_index=0),
    units=lambda targets: (targets != 0).sum(),
)
ignored_targets = of_rows(lambda x, y: list(zip(x, torch.where(y == 0, -100, y), strict=True)))
summed = replace(plain, loss=lambda outputs, targets: F.cross_entropy(outputs, targets, reduction="sum"), units="sum")
smoothed = replace(plain, loss=nn.CrossEntropyLoss(label_smoothing=0.1))
many_labels = of_rows(in_table, loss=F.binary_cross_entropy_with_logits)
of_one_element = replace(plain, loss=lambda outputs, targets: F.cross_entropy(outputs, targets)[None])
loss_and_weight = replace(plain, loss=lambda o, t: (F.cross_entropy(o, t, reduction="sum"), len(t)))
loss_of_each = replace(plain, loss=lambda outputs, targets: F.cross_entropy(outputs, targets, reduction="none"))
loss_number = replace(plain, loss=lambda outputs, targets: F.cross_entropy(outputs, targets).item())
loss_detached = replace(plain, loss=lambda outputs, targets: F.cross_entropy(outputs, targets).detach())
