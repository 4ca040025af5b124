"""A small convolutional network: convolution, batch norm, ReLU, pooling; then a head of two linear layers."""

from collections.abc import Sequence
from itertools import pairwise

import torch
from torch import nn

from atoll.parallel.engine.blueprint import Blueprint, Styles


class CNN(nn.Module):
    """A map of images (B, channels[0], side, side) to logits (B, classes).

    Args:
        channels: of the image and of each stage, which halves the side; at least two.
        side: of the image, a multiple of 2^stages.
        hidden: features between the two linear layers.
        classes: outputs.
        norm: put a batch norm after each convolution.
    """

    def __init__(
        self, channels: Sequence[int], side: int, *, hidden: int = 128, classes: int = 10, norm: bool = True
    ) -> None:
        super().__init__()
        halvings = len(channels) - 1
        if halvings < 1 or side % 2**halvings:
            raise ValueError(
                f"CNN: side must be a multiple of {2 ** max(halvings, 1)}, got {side} with {list(channels)}"
            )
        self.hidden = hidden
        self.features = nn.ModuleList(_stage(before, after, norm=norm) for before, after in pairwise(channels))
        self.flatten = nn.Flatten()
        self.head = nn.Sequential(
            nn.Linear(channels[-1] * (side // 2**halvings) ** 2, hidden), nn.ReLU(), nn.Linear(hidden, classes)
        )

    @property
    def blueprint(self) -> Blueprint:
        """The blueprint: under tp the head is sharded, the convolutions are replicated."""
        return Blueprint(chain=("features", "flatten", "head"), tensor=_styles, divisible={"hidden": self.hidden})

    def forward(self, images: torch.Tensor) -> torch.Tensor:
        """Compute (B, C, side, side) -> (B, classes)."""
        x = images
        for stage in self.features:
            x = stage(x)
        x = self.flatten(x)
        logits: torch.Tensor = self.head(x)
        return logits


def _stage(before: int, after: int, *, norm: bool) -> nn.Sequential:
    layers: list[nn.Module] = [nn.Conv2d(before, after, kernel_size=3, padding=1, bias=not norm)]
    if norm:
        layers.append(nn.BatchNorm2d(after))
    return nn.Sequential(*layers, nn.ReLU(), nn.MaxPool2d(2))


def _styles(_sequence_parallel: bool, _loss_parallel: bool) -> Styles:
    from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel

    return {"head.0": ColwiseParallel(), "head.2": RowwiseParallel()}
