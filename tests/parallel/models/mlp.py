"""A multi-layer perceptron: linear layers with ReLU between them, as one sequential chain."""

from collections.abc import Sequence
from itertools import pairwise

import torch
from torch import nn

from atoll.parallel.engine.blueprint import Blueprint, Styles


class MLP(nn.Module):
    """A map of (B, sizes[0]), or (B, ..) that flattens to it, to (B, sizes[-1]).

    Args:
        sizes: numbers of features, from the inputs over the hidden layers to the outputs; at least two.
    """

    def __init__(self, sizes: Sequence[int]) -> None:
        super().__init__()
        if len(sizes) < 2 or min(sizes) < 1:
            raise ValueError(f"MLP: sizes must be at least two numbers >= 1, got {list(sizes)}")
        self.sizes = tuple(sizes)
        linears = [nn.Linear(before, after) for before, after in pairwise(sizes)]
        hidden = [nn.Sequential(linear, nn.ReLU()) for linear in linears[:-1]]
        self.layers = nn.ModuleList([*hidden, nn.Sequential(linears[-1])])

    @property
    def blueprint(self) -> Blueprint:
        """The blueprint: layers in pairs, the first sharded by its outputs, the second by its inputs; a sum follows."""
        return Blueprint(
            chain=("layers",),
            tensor=self._styles,
            divisible={f"sizes[{index}]": self.sizes[index] for index in range(1, len(self.sizes) - 1, 2)},
        )

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Map (B, ..) to (B, outputs)."""
        x = x.flatten(1)
        for layer in self.layers:
            x = layer(x)
        return x

    def _styles(self, _sequence_parallel: bool, _loss_parallel: bool) -> Styles:
        from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel

        pairs = len(self.layers) // 2
        columns: Styles = {f"layers.{2 * pair}.0": ColwiseParallel() for pair in range(pairs)}
        return columns | {f"layers.{2 * pair + 1}.0": RowwiseParallel() for pair in range(pairs)}
