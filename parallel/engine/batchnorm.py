"""Batch norms with statistics over all ranks together, or over virtual batches of a fixed size.

    sync   mean and variance over the examples of every rank with data; torch has it for GPUs only
    ghost  each N examples are normalized by themselves (Hoffer et al., "Train longer, generalize better", 2017, Alg. 1)

Running statistics are updated once per normalized batch: μ <- (1 - η) μ + η mean, with the unbiased variance.
"""

from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.nn import functional
from torch.nn.modules.batchnorm import _BatchNorm

from atoll.parallel.optimizers.norms import local


def convert(part: nn.Module, kind: str, group: dist.ProcessGroup | None) -> None:
    """Replace every batch norm of a model; parameters, buffers and names stay.

    Args:
        part: of a model.
        kind: `local` (no change), `sync`, or `ghost:N`.
        group: the ranks with different data; None: this one alone.
    """
    if kind == "local" or (kind == "sync" and group is None):
        return
    size = int(kind.partition(":")[2] or 0)
    converted: dict[nn.Module, nn.Module] = {}
    for name, norm in list(part.named_modules(remove_duplicate=False)):
        if isinstance(norm, _BatchNorm):
            if norm not in converted:
                converted[norm] = GhostBatchNorm(norm, size) if size else SyncedBatchNorm(norm, group)
            part.set_submodule(name, converted[norm])


class _Converted(_BatchNorm):
    """A batch norm that takes over another's parameters, buffers, settings and hooks."""

    def __init__(self, norm: _BatchNorm) -> None:
        super().__init__(norm.num_features, norm.eps, norm.momentum, norm.affine, norm.track_running_stats)
        vars(self).update(vars(norm))

    def _check_input_dim(self, input: torch.Tensor) -> None:
        if input.dim() < 2:
            raise ValueError(f"a batch norm needs (B, features, ..), got {tuple(input.shape)}")

    def _is_inference(self) -> bool:
        return not self.training and self.running_mean is not None


class GhostBatchNorm(_Converted):
    """Batch norm over virtual batches of `size` examples, the last of which may be smaller."""

    def __init__(self, norm: _BatchNorm, size: int) -> None:
        super().__init__(norm)
        self.size = size

    def forward(self, input: torch.Tensor) -> torch.Tensor:
        """Normalize (B, features, ..); the shape stays."""
        if self._is_inference() or len(input) <= self.size:
            return super().forward(input)
        ghosts = list(torch.split(input, self.size))
        if len(ghosts[-1]) == 1:  # one example has no variance
            ghosts[-2:] = [torch.cat(ghosts[-2:])]
        return torch.cat([super(GhostBatchNorm, self).forward(ghost) for ghost in ghosts])


class SyncedBatchNorm(_Converted):
    """Batch norm over the examples of all ranks of a group, on any device."""

    def __init__(self, norm: _BatchNorm, group: dist.ProcessGroup | None) -> None:
        super().__init__(norm)
        self.group = group

    def forward(self, input: torch.Tensor) -> torch.Tensor:
        """Normalize (B, features, ..); the shape stays."""
        self._check_input_dim(input)
        if self._is_inference():
            return functional.batch_norm(
                input, self.running_mean, self.running_var, self.weight, self.bias, False, 0.0, self.eps
            )
        shape = [1, -1, *([1] * (input.dim() - 2))]
        dims = [dim for dim in range(input.dim()) if dim != 1]
        x = local(input).float()  # under tp a replica
        count = torch.full((1,), float(x.numel() // x.shape[1]), device=x.device)
        sums = torch.cat([x.sum(dims), count])
        sums = summed(sums, self.group)
        mean = sums[:-1] / sums[-1]
        centred = x - mean.view(shape)  # two passes: no cancellation in the variance
        squares = summed(centred.square().sum(dims), self.group)
        variance = squares / sums[-1]
        self._update(mean.detach(), variance.detach(), sums[-1].detach())
        normalized = centred * (variance + self.eps).rsqrt().view(shape)
        if self.affine:
            weight, bias = local(self.weight).float(), local(self.bias).float()
            normalized = normalized * weight.view(shape) + bias.view(shape)
        output: torch.Tensor = normalized.to(input.dtype)
        return output

    @torch.no_grad()
    def _update(self, mean: torch.Tensor, variance: torch.Tensor, count: torch.Tensor) -> None:
        if not self.training or self.running_mean is None or self.running_var is None:
            return
        assert self.num_batches_tracked is not None
        running_mean, running_var, batches = map(local, (self.running_mean, self.running_var, self.num_batches_tracked))
        batches.add_(1)
        momentum = 1.0 / float(batches) if self.momentum is None else self.momentum
        running_mean.lerp_(mean.to(running_mean.dtype), momentum)
        unbiased = variance * (count / (count - 1).clamp(min=1))
        running_var.lerp_(unbiased.to(running_var.dtype), momentum)


def summed(x: torch.Tensor, group: dist.ProcessGroup | None) -> torch.Tensor:
    """Return the sum of the ranks' tensors; gradients flow through it."""
    y: torch.Tensor = _SumOverRanks.apply(x, group)  # type: ignore[no-untyped-call]
    return y


class _SumOverRanks(torch.autograd.Function):
    """A sum over ranks, y = sum of x. Every rank's loss depends on every x, so the gradients are summed as well."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, group: dist.ProcessGroup | None) -> torch.Tensor:
        ctx.group = group
        y = x.clone()
        dist.all_reduce(y, group=group)
        return y

    @staticmethod
    def backward(ctx: Any, *gradients: torch.Tensor) -> tuple[torch.Tensor, None]:
        gradient = gradients[0].clone()
        dist.all_reduce(gradient, group=ctx.group)
        return gradient, None
