"""One step, one state: what every strategy has in common."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel

from atoll.parallel.communication.hooks import HookState
from atoll.parallel.communication.outer import Outer
from atoll.parallel.data.batch import Batch, tensors
from atoll.parallel.engine.buffers import average_buffers
from atoll.parallel.engine.gradients import clip, gradients_of, settle, total_norm
from atoll.parallel.engine.mesh import Axes
from atoll.parallel.engine.passes import Observe, Total
from atoll.parallel.engine.plan import Plan
from atoll.parallel.engine.ties import Ties

DP_AXES = ("dp_replicate", "dp_shard")


class Executor(Protocol):
    """Forward and backward passes: `passes.Passes` or `pipeline.Pipeline`."""

    def train(self, batch: Batch, total: Total, after_first: Callable[[int], None] | None = None) -> torch.Tensor:
        """Leave the gradients in the parameters; the weighted loss of this rank's units."""

    def evaluate(self, batch: Batch, observe: Observe) -> None:
        """Let `observe` see outputs and targets."""


@dataclass(frozen=True, slots=True)
class NoiseSample:
    """The squared norms of two gradients at the same weights, for the gradient noise scale (McCandlish et al. 2018)."""

    small_units: int
    """Units that the smaller gradient is the mean over: the first micro-batches of all ranks."""
    small_square: torch.Tensor
    """Its squared L2 norm."""
    big_units: int
    big_square: torch.Tensor


@dataclass(frozen=True, slots=True)
class Measured:
    """What a step has shown, as tensors on the device, so that nobody waits for them who does not look."""

    loss: torch.Tensor
    """Mean over the units of the global batch, before the step; of this rank's share alone unless it was reported."""
    grad_norm: torch.Tensor | None
    """L2 norm of the global gradient before clipping; None when it was neither clipped nor reported."""
    noise: NoiseSample | None = None


class Engine:
    """A model on its mesh: the parts of it that lie on this rank, their optimizers, and the step.

    Built by `assemble.assemble`. The state is `parts`, `optimizers`, `steps` and, where there are such, what the copies
    have between their meetings (`outer`) and what compression owes (`compression`).
    """

    def __init__(
        self,
        *,
        parts: Sequence[nn.Module],
        optimizers: Sequence[torch.optim.Optimizer],
        executor: Executor,
        plan: Plan,
        axes: Axes | None,
        device: torch.device,
        lr: Callable[[int], float] | None = None,
        clip_norm: float | None = None,
        sequence: int | None = None,
        ties: Ties | None = None,
        outer: Outer | None = None,
        compression: HookState | None = None,
    ) -> None:
        self.parts, self.optimizers, self.plan, self.axes, self.device = parts, optimizers, plan, axes, device
        self.steps = 0
        """Steps taken since the beginning of the training."""
        self.outer, self.compression = outer, compression
        self._executor, self._lr, self._clip_norm, self._ties = executor, lr, clip_norm, ties
        self.parameters = dict(pair for part in parts for pair in trained(part))
        """By name in the whole model: those that lie here and are trained."""
        self._sequence = sequence
        self._values = list(self.parameters.values())

    def step(
        self, batch: Batch, *, total: int | None = None, report: bool = True, measure_noise: bool = False
    ) -> Measured:
        """Take one step of every optimizer on the global batch of which `batch` is this rank's part.

        Every rank must call it with the same `report` and `measure_noise`; ranks of one data-parallel place (stages,
        tp) with the same batch.

        Args:
            batch: of this rank; `count` 0 if it has none.
            total: units of the global batch where the caller knows them, which saves a small all-reduce.
            report: whether the loss of the global batch and the norm of the gradient are wanted.
            measure_noise: whether a `NoiseSample` is wanted; the batch is taken in at least two micro-batches.

        Raises:
            ValueError: tp cannot cut the sequence of these inputs.
        """
        self._check(batch)
        for part in self.parts:
            part.train()
        for optimizer in self.optimizers:
            optimizer.zero_grad(set_to_none=True)
        asked = self._total(batch) if total is None else lambda: total
        first: list[tuple[int, torch.Tensor]] = []
        after_first = (lambda count: first.append(self._after_first(count))) if measure_noise else None
        loss = self._executor.train(batch, asked, after_first)
        units = asked()
        self._settle()
        norm = self._norm() if report or measure_noise or self._clip_norm is not None else None
        noise = _noise(first[0], int(units), norm) if first and norm is not None else None
        if self._clip_norm is not None and norm is not None:
            clip(gradients_of(self._values), norm, self._clip_norm)
        self._update()
        return Measured(self._global(loss, units) if report else loss, norm, noise)

    def flush(self) -> None:
        """Make one model of all ranks: for before an evaluation, a checkpoint, an export."""
        if self.outer is not None:
            self.outer.flush(self.parameters)
        average_buffers(self.parts, self.axes)

    def evaluate(self, batch: Batch, observe: Observe) -> None:
        """Let `observe` see outputs and targets, in eval mode; on the ranks of the last stage, once for each tp group.

        Every rank must call it as often as the others, with fillers where it has nothing.

        Raises:
            ValueError: as `step`.
        """
        self._check(batch)
        for part in self.parts:
            part.eval()
        is_seen = self.axes is None or self.axes.coordinates["tp"] == 0
        self._executor.evaluate(batch, observe if is_seen else _ignore)

    def _check(self, batch: Batch) -> None:
        """Every rank of a tp group has the same inputs, so that none of them goes on without the others."""
        if self._sequence is None or self.axes is None:
            return
        tp = self.axes.mesh.tp
        lengths = [tensor.shape[self._sequence] for tensor in tensors(batch.inputs) if tensor.dim() > self._sequence]
        if wrong := [length for length in lengths if length % tp]:
            raise ValueError(f"tp={tp} must divide the length of the sequence (sequence_parallel), got {wrong[0]}")

    def _settle(self) -> None:
        """Finish the sums that the passes leave open."""
        if self.axes is not None and self.axes.mesh.tp > 1 and not self.plan.is_sharded:
            settle(self._values, self.axes)
        if self._ties is not None:
            self._ties.add_up()

    def _update(self) -> None:
        if self.outer is not None:
            self.outer.before_step(self.parameters)
        for optimizer in self.optimizers:
            if self._lr is not None:
                for group in optimizer.param_groups:
                    group["lr"] = self._lr(self.steps)
            optimizer.step()
        if self.outer is not None:
            self.outer.after_step(self.parameters, self.steps)
        self.steps += 1

    def _synced_axes(self) -> tuple[str, ...]:
        """The axes along which gradients are added up in each step."""
        return DP_AXES if self.plan.outer == "none" else ("dp_shard",)

    def _total(self, batch: Batch) -> Total:
        """Ask the other ranks for their units, and go on; the forward pass hides the answer's way."""
        if self.axes is None or self.plan.synced_dp == 1:
            return lambda: batch.count
        group = self.axes.dp_group if self.plan.outer == "none" else self.axes.group("dp_shard")
        total = torch.tensor(batch.count, device=self.device)
        on_its_way = [dist.all_reduce(total, group=group, async_op=True)]

        def answer() -> torch.Tensor:
            while on_its_way:
                on_its_way.pop().wait()
            return total

        return answer

    def _norm(self) -> torch.Tensor:
        owned = gradients_of(self._values if self._ties is None else self._ties.owned(self._values))
        return total_norm(owned, self.axes, self.device)

    def _global(self, loss: torch.Tensor, units: int | torch.Tensor) -> torch.Tensor:
        if self.axes is None:
            return loss
        total = self.axes.sum_over(loss.clone(), "pp", *self._synced_axes())
        if self.plan.outer == "none":
            return total
        both = torch.stack([total * units, torch.as_tensor(units, dtype=total.dtype, device=total.device)])
        weighted, of_all = self.axes.sum_over(both, "dp_replicate")  # each copy has a mean of its own
        mean: torch.Tensor = weighted / of_all.clamp(min=1)
        return mean

    def _after_first(self, count: int) -> tuple[int, torch.Tensor]:
        """Units of all ranks' first micro-batches, and the squared norm of what the gradients are now."""
        units = count
        if self.axes is not None:
            units = int(self.axes.sum_over(torch.tensor(count, device=self.device), *self._synced_axes()))
        self._settle()
        return units, self._norm().square()


def trained(part: nn.Module) -> list[tuple[str, nn.Parameter]]:
    """The parameters of a part that an optimizer moves, by their names in the whole model."""
    inner = part.module if isinstance(part, DistributedDataParallel) else part
    return [(name, parameter) for name, parameter in inner.named_parameters() if parameter.requires_grad]


def _noise(first: tuple[int, torch.Tensor], units: int, norm: torch.Tensor) -> NoiseSample | None:
    """None when the first micro-batches had no units, or all. Their gradient was weighted by small / units."""
    small, square = first
    if not 0 < small < units:
        return None
    return NoiseSample(small, square * (units / small) ** 2, units, norm.square())


def _ignore(_outputs: Any, _targets: Any) -> None:
    """What another rank observes already."""
