"""Batch norms with statistics over all ranks together, or over virtual batches of a fixed size.

    sync   mean and variance over the examples of every rank with data; torch has it for GPUs only
    ghost  each N examples of the global batch are normalized by themselves, wherever the ranks divide it; a last one
           alone joins those before (Hoffer et al., "Train longer, generalize better", 2017, Alg. 1)

Running statistics are updated once per normalized batch: μ <- (1 - η) μ + η mean, with the unbiased variance.
"""

from collections.abc import Iterable
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.nn import functional
from torch.nn.modules.batchnorm import _BatchNorm

from atoll.training.optimizers.norms import local


def convert(part: nn.Module, kind: str, group: dist.ProcessGroup | None) -> None:
    """Switch every batch norm of a model to this kind of statistics, in place; the objects stay, with all they hold.

    Args:
        part: the part of a model, without `faults`.
        kind: `local`, `sync`, or `ghost:N`.
        group: the ranks with different data; None: this one alone.
    """
    size = int(kind.partition(":")[2] or 0)
    for norm in part.modules():
        if isinstance(norm, _BatchNorm) and _is_torchs(norm):
            norm.__class__ = type(type(norm).__name__, (SharedBatchNorm, type(norm)), {"__module__": __name__})
            assert isinstance(norm, SharedBatchNorm)
            norm.group, norm.size, norm.real = None if kind == "local" else group, size, None


def faults(model: nn.Module, kind: str) -> list[str]:
    """Return a sentence for the batch norms whose custom `forward` a kind of statistics would replace."""
    norms = {name: norm for name, norm in model.named_modules() if isinstance(norm, _BatchNorm)}
    if kind == "local" or not (other := [name for name, norm in norms.items() if not _is_torchs(norm)]):
        return []
    return [
        f"plan.batchnorm={kind} takes the place of torch's BatchNorm.forward, and {', '.join(other)} "
        f"({type(norms[other[0]]).__name__}) has another one: use plan.batchnorm=local, or a module for what it adds"
    ]


def _is_torchs(norm: _BatchNorm) -> bool:
    return type(norm).forward in (_BatchNorm.forward, nn.SyncBatchNorm.forward)


class Real:
    """Setter of the number of examples of a pass that count: the first ones. The others are fillers or padding.

    Args:
        parts: the parts of the model on this rank, converted.
    """

    def __init__(self, parts: Iterable[nn.Module]) -> None:
        self._norms = [module for part in parts for module in part.modules() if isinstance(module, SharedBatchNorm)]

    def set(self, rows: int, given: int) -> None:
        """Set how many (`rows`) of the next pass's `given` examples count in the statistics."""
        for norm in self._norms:
            norm.real = None if rows == given else (rows, given)


class SharedBatchNorm(_BatchNorm):
    """A batch norm over the examples of all ranks of a group, on any device, by virtual batches or all together."""

    group: dist.ProcessGroup | None
    """The ranks with different data, in the order of the examples; None: this one alone."""
    size: int
    """The number of examples of a virtual batch; 0: all examples are one."""
    real: tuple[int, int] | None
    """The examples that count, and all (`Real`); None: all count."""

    def _check_input_dim(self, input: torch.Tensor) -> None:
        if input.dim() < 2:
            raise ValueError(f"a batch norm needs (B, features, ..), got {tuple(input.shape)}")

    def forward(self, input: torch.Tensor) -> torch.Tensor:
        """Normalize (B, features, ..); the shape stays."""
        self._check_input_dim(input)
        if not self.training and self.running_mean is not None:
            return functional.batch_norm(
                input, self.running_mean, self.running_var, self.weight, self.bias, False, 0.0, self.eps
            )
        if self.group is None and self.real is None and (not self.size or len(input) <= self.size):
            return _BatchNorm.forward(self, input)
        return self._normalized(input)

    def _normalized(self, input: torch.Tensor) -> torch.Tensor:
        x = local(input).float()  # under tp a replica
        x = x.reshape(len(x), self.num_features, -1)
        real = self._real(len(x))
        places, number = self._places(len(x), real, x.device)
        counts = x.new_zeros(number).index_add(0, places[:real], x.new_full((real,), x.shape[2]))
        sums = torch.cat([_sums(x, places, real, number), counts.unsqueeze(1)], 1)
        sums = summed(sums, self.group)
        counts = sums[:, -1].detach()
        at_least_one = counts.clamp(min=1).unsqueeze(1)
        mean = sums[:, :-1] / at_least_one
        centred = x - mean[places].unsqueeze(2)  # two passes: no cancellation in the variance
        variance = summed(_sums(centred.square(), places, real, number), self.group) / at_least_one
        self._update(mean.detach(), variance.detach(), counts)
        normalized = centred * (variance + self.eps).rsqrt()[places].unsqueeze(2)
        if self.affine:
            weight, bias = local(self.weight).float(), local(self.bias).float()
            normalized = normalized * weight.view(1, -1, 1) + bias.view(1, -1, 1)
        output: torch.Tensor = normalized.reshape(input.shape).to(input.dtype)
        return output

    def _real(self, rows: int) -> int:
        """Return the number of rows that count; a model may make several rows of an example, or none."""
        if self.real is None or rows % self.real[1]:
            return rows
        return rows // self.real[1] * self.real[0]

    def _places(self, rows: int, real: int, device: torch.device) -> tuple[torch.Tensor, int]:
        """Return the virtual batch of each row, and their number over all ranks."""
        if not self.size:
            return torch.zeros(rows, dtype=torch.long, device=device), 1
        before, total = 0, real
        if self.group is not None:
            counts = [torch.zeros(1, dtype=torch.long, device=device) for _ in range(self.group.size())]
            dist.all_gather(counts, torch.tensor([real], device=device), group=self.group)
            of_ranks = torch.cat(counts).tolist()
            before, total = sum(of_ranks[: self.group.rank()]), sum(of_ranks)
        number = max(-(-total // self.size) - (total % self.size == 1 and total > self.size), 1)
        places = (torch.arange(before, before + rows, device=device) // self.size).clamp(max=number - 1)
        return places, number

    @torch.no_grad()
    def _update(self, means: torch.Tensor, variances: torch.Tensor, counts: torch.Tensor) -> None:
        """Update the running statistics by those of the virtual batches, one after another."""
        if not self.training or self.running_mean is None or self.running_var is None:
            return
        assert self.num_batches_tracked is not None
        running_mean, running_var, batches = (
            local(each).data  # torch, too, writes without telling autograd, which has saved them for earlier passes
            for each in (self.running_mean, self.running_var, self.num_batches_tracked)
        )
        unbiased = variances * (counts / (counts - 1).clamp(min=1)).unsqueeze(1)
        for mean, variance, count in zip(means, unbiased, counts, strict=True):
            has_any = (count > 0).to(batches.dtype)  # a micro-batch of fillers is none
            batches.add_(has_any)
            momentum = has_any / batches.clamp(min=1) if self.momentum is None else has_any * self.momentum
            running_mean.lerp_(mean.to(running_mean.dtype), momentum.to(running_mean.dtype))
            running_var.lerp_(variance.to(running_var.dtype), momentum.to(running_var.dtype))


def _sums(x: torch.Tensor, places: torch.Tensor, real: int, number: int) -> torch.Tensor:
    """Return the sums (virtual batches, features) over the rows that count of (B, features, places)."""
    rows = x[:real].sum(2)
    return (
        rows.sum(0, keepdim=True)
        if number == 1
        else rows.new_zeros(number, x.shape[1]).index_add(0, places[:real], rows)
    )


def summed(x: torch.Tensor, group: dist.ProcessGroup | None) -> torch.Tensor:
    """Return the sum of the ranks' tensors (None: this one alone); gradients flow through it."""
    if group is None:
        return x
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
