"""Batch normalization of many clients as one group: each client's statistics are taken over its batch alone.

    mean, var   of a channel over the client's n examples and all positions, N numbers
    y           = (x - mean) / sqrt(var + ε) * weight + bias
    running     <- (1 - f) running + f (mean, var N / (N - 1)),  f: `momentum`, or 1 / count without one

Each client has its running statistics and count of batches, which go into its update. Source: Ioffe and Szegedy, "Batch
Normalization: Accelerating Deep Network Training by Reducing Internal Covariate Shift", ICML 2015.
"""

from collections.abc import Iterator
from typing import Any

import torch
from torch.nn import functional

from atoll.simulations.engines.batched.measures import own_rows
from atoll.simulations.engines.batched.stacked_layers import Stacked


class BatchNorm(Stacked):
    """The stacked nn.BatchNorm1d, nn.BatchNorm2d and nn.BatchNorm3d."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Normalize inputs (m n, C, ...), each client's batch by itself.

        Raises:
            ValueError: a client has a single number in a channel, as in torch's layer.
        """
        y: torch.Tensor = self.shared.call(self._normalized, x)
        return y

    def _normalized(self, x: torch.Tensor) -> torch.Tensor:
        m, sizes = self.shared.stack.clients, self.shared.sizes
        by_client = x.reshape(m, -1, x.shape[1], x[0, 0].numel())
        numbers = torch.from_numpy(sizes * by_client.shape[3]).to(x)[:, None]
        if numbers.min() < 2:
            raise ValueError("batch norm needs more than one value of a channel")
        is_full = bool((sizes == by_client.shape[1]).all())
        y, mean, var = self._fused(by_client) if is_full else self._masked(by_client, numbers)
        self._track(mean, var, numbers)
        return y.reshape(x.shape)

    def _fused(self, x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        """Normalize (m, n, C, P) with the channels of all clients side by side; also return mean and variance."""
        m, _, channels, _ = x.shape
        weight, bias = (self.shared.leaf(name).flatten() if name else None for name in (self.weight, self.bias))
        mean, var = x.new_zeros(2, m * channels)  # a momentum of 1 leaves the batch's statistics in them
        together = x.transpose(0, 1).flatten(1, 2)
        y = functional.batch_norm(together, mean, var, weight, bias, True, 1.0, self.layer.eps)
        back = y.unflatten(1, (m, channels)).transpose(0, 1)  # type: ignore[no-untyped-call]
        return back, mean.view(m, channels), var.view(m, channels)

    def _masked(self, x: torch.Tensor, numbers: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        """Normalize as `_fused`, where some of the n examples are padding."""
        is_own = own_rows(self.shared.sizes, x.shape[1]).to(x)[:, :, None, None]
        mean = (x * is_own).sum((1, 3)) / numbers
        centered = x - mean[:, None, :, None]
        var = (centered * is_own).square().sum((1, 3)) / numbers
        y = centered * (var + self.layer.eps).rsqrt()[:, None, :, None]
        y = y * self.shared.leaf(self.weight)[:, None, :, None] if self.weight else y
        y = y + self.shared.leaf(self.bias)[:, None, :, None] if self.bias else y
        return y, mean.detach(), (var * numbers / (numbers - 1)).detach()

    @torch.no_grad()
    def _track(self, mean: torch.Tensor, var: torch.Tensor, numbers: torch.Tensor) -> None:
        """Move the running statistics of the clients that train."""
        if not self.layer.track_running_stats:
            return
        m, running = len(mean), self.shared.running
        count = running[f"{self.prefix}num_batches_tracked"][:m]
        count += 1
        factor = 1 / count[:, None] if self.layer.momentum is None else self.layer.momentum
        for name, found in (("running_mean", mean), ("running_var", var)):
            every = running[f"{self.prefix}{name}"][:m]
            every.mul_(1 - factor).add_(found * factor)

    @staticmethod
    def obstacles(layer: Any) -> Iterator[str]:
        """Yield the reasons that a batch norm cannot be stacked."""
        if not layer.training:
            yield "is in evaluation mode"
        if layer.track_running_stats and layer.running_mean is None:
            yield "has no running statistics"
