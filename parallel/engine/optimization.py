"""The optimization of a training: its loss, optimizers, learning rate and clipping."""

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import nn

from atoll.parallel.engine.passes import Loss

MakeOptimizer = Callable[[list[tuple[str, nn.Parameter]]], torch.optim.Optimizer]
"""Named parameters -> their optimizer. It may leave parameters out, and must not take others."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Optimization:
    """The loss of a training, and the way in which its steps minimize it.

    Raises:
        ValueError: clip_norm is not above 0.
    """

    loss: Loss
    """(outputs, targets) -> mean over the units of the batch."""

    make_optimizer: MakeOptimizer
    """The constructor of the optimizer, called once for each stage on a rank."""

    lr: Callable[[int], float] | None = None
    """Step (from 0) -> learning rate; None leaves it to the optimizer."""

    clip_norm: float | None = None
    """The largest L2 norm of the global gradient (> 0); None: no clipping."""

    def __post_init__(self) -> None:
        if self.clip_norm is not None and not self.clip_norm > 0:
            raise ValueError(f"clip_norm must be above 0, got {self.clip_norm}")
