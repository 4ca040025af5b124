"""The train step that all strategies share, and its state."""

from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from typing import Any, Protocol

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel

from atoll.parallel.communication.hooks import HookState
from atoll.parallel.communication.outer import Outer
from atoll.parallel.data.batch import Batch, tensors
from atoll.parallel.engine.agreement import Agreement
from atoll.parallel.engine.attached import Attached
from atoll.parallel.engine.axes import Axes
from atoll.parallel.engine.buffers import average_buffers
from atoll.parallel.engine.gradients import clip, gradients_of, settle, total_norm
from atoll.parallel.engine.optimization import Optimization
from atoll.parallel.engine.passes import Observe, Total, pass_of_copies
from atoll.parallel.engine.plan import Plan
from atoll.parallel.engine.scalars import sum_scalars
from atoll.parallel.engine.step_faults import CopiesDiffer, differing_copies, pass_of_shards
from atoll.parallel.engine.ties import Ties
from atoll.training.trials.contract import lone_row_refused

DP_AXES = ("dp_replicate", "dp_shard")


class Executor(Protocol):
    """The forward and backward passes: `passes.Passes` or `pipeline.Pipeline`."""

    def train(self, batch: Batch, total: Total, after_first: Callable[[float], None] | None = None) -> torch.Tensor:
        """Compute the gradients of the parameters; return the weighted loss of this rank's units."""

    def evaluate(self, batch: Batch, observe: Observe) -> None:
        """Call `observe` with outputs and targets of a batch."""


@dataclass(frozen=True, slots=True)
class NoiseSample:
    """The squared norms of two gradients at the same weights, for the gradient noise scale (McCandlish et al. 2018)."""

    small_units: float
    """Units over which the smaller gradient is the mean: the first micro-batches of all ranks."""
    small_square: torch.Tensor
    """The squared L2 norm of the smaller gradient."""
    big_units: float
    """Units over which the larger gradient is the mean: the global batch."""
    big_square: torch.Tensor
    """The squared L2 norm of the larger gradient."""


@dataclass(frozen=True, slots=True)
class Measured:
    """The measurements of a step, as tensors on the device: only a reader of their values waits for them."""

    loss: torch.Tensor
    """The mean over the units of the global batch, before the step; if it was not reported, this rank's share of it."""
    grad_norm: torch.Tensor | None
    """The L2 norm of the global gradient before clipping; None if it was neither clipped nor reported."""
    noise: NoiseSample | None = None
    """The noise sample, if it was requested and both gradients have units."""


@dataclass(frozen=True, slots=True, kw_only=True)
class LocalModel:
    """The parts of a model on this rank, with their optimizers and their passes."""

    parts: Sequence[nn.Module]
    """The stages on this rank, wrapped; without a pipeline one."""
    ties: Ties | None
    """The tied weights that lie on different stages."""
    optimizers: Sequence[torch.optim.Optimizer]
    """The optimizer of each part."""
    executor: Executor
    """The forward and backward passes."""
    sequence: int | None
    """The dimension of the inputs that sequence parallelism shards, if it does."""
    agreements: Sequence[Agreement] = ()
    """The agreement of the ranks on each part, if they share the model out."""
    attached: Attached | None = None
    """The attributes and hooks of the model's parameters."""


class Engine:
    """A model on its mesh: the parts on this rank, their optimizers, and the step. `assemble.assemble` builds it.

    The state is `parts`, `optimizers`, `steps` and, if they exist, the state of the copies between synchronizations
    (`outer`) and the residuals of compression (`compression`).

    Args:
        local: the parts of the model on this rank.
        plan: the parallelism of the training.
        optimization: learning rate and clipping of the steps.
        axes: the mesh on the ranks; None for one rank.
        device: the device of this rank.
        outer: the synchronization of the copies along dp_replicate, if it is not in every step.
        compression: the state of the gradients' compression.
    """

    def __init__(
        self,
        local: LocalModel,
        plan: Plan,
        optimization: Optimization,
        *,
        axes: Axes | None,
        device: torch.device,
        outer: Outer | None = None,
        compression: HookState | None = None,
    ) -> None:
        self.parts = local.parts
        self.plan, self.axes, self.device = plan, axes, device
        self.compression = compression
        self._executor, self._ties, self._sequence = local.executor, local.ties, local.sequence
        self.agreements, self._attached = local.agreements, local.attached
        self.fixed: Sequence[torch.Tensor] = ()
        """The buffers that no training changes, of which the ranks take no mean."""
        self._is_summed = False
        self.begin(local.optimizers, optimization, outer)
        self.parameters = dict(pair for part in self.parts for pair in trained(part))
        """The trained parameters on this rank, by their names in the whole model."""
        self._values = list(self.parameters.values())
        self._scalars = [value for value in self._values if value.dim() == 0 and plan.is_sharded]

    def begin(
        self, optimizers: Sequence[torch.optim.Optimizer], optimization: Optimization, outer: Outer | None
    ) -> None:
        """Reset the engine for a training of the unchanged parts; see `assemble.begin_again`."""
        self.optimizers, self.outer = optimizers, outer
        self.steps = 0
        """Steps taken since the beginning of the training."""
        self.amend: Callable[[], None] | None = None
        """A change of the gradients in each step, after they were summed over the ranks and before they are clipped."""
        self._lr, self._clip_norm = optimization.lr, optimization.clip_norm

    def replace_passes(self, change: Callable[[Executor], Executor], *, sums: bool = False) -> None:
        """Take other passes, made from the present ones.

        Args:
            change: the present passes -> the other ones.
            sums: they leave no sum over ranks to the step.
        """
        self._executor, self._is_summed = change(self._executor), sums

    @property
    def executor(self) -> Executor:
        """The present passes."""
        return self._executor

    def step(
        self, batch: Batch, *, total: float | None = None, report: bool = True, measure_noise: bool = False
    ) -> Measured:
        """Take one step of every optimizer on the global batch, of which `batch` is this rank's part.

        Every rank must call it with the same `report` and `measure_noise`; ranks with the same data (stages, tp) with
        the same batch.

        Args:
            batch: the batch of this rank; `count` 0 if it has none.
            total: units of the global batch, if the caller knows them, which saves a small all-reduce.
            report: compute the loss of the global batch and the norm of the gradient.
            measure_noise: take a `NoiseSample`; the batch is processed in at least two micro-batches.

        Raises:
            ValueError: tp cannot divide the sequence of these inputs.
            CallsDiffer, NotGathered: the sharding does not support what the model does; nothing was applied.
        """
        self._check(batch)
        for part in self.parts:
            part.train()
        for optimizer in self.optimizers:
            optimizer.zero_grad(set_to_none=True)
        global_units = self._total(batch) if total is None else lambda: total
        first: list[tuple[float, torch.Tensor]] = []
        after_first = (lambda count: first.append(self._after_first(count))) if measure_noise else None
        with self._passing(), lone_row_refused():
            loss = self._executor.train(batch, global_units, after_first)
        units = global_units()
        if not self._is_summed:
            for agreement in self.agreements:
                agreement.settle()
            self._settle()
        noise = _noise(first[0], float(units), self._norm()) if first else None
        if self._attached is not None:
            self._attached.call(self.parameters)
        if self.amend is not None:
            self.amend()
        norm = self._norm() if report or measure_noise or self._clip_norm is not None else None
        if self._clip_norm is not None and norm is not None:
            clip(gradients_of(self._values), norm, self._clip_norm)
        self._update()
        return Measured(self._global(loss, units) if report else loss, norm, noise)

    def _passing(self) -> AbstractContextManager[None]:
        if self.plan.is_ddp:
            return pass_of_copies()
        tp = self.plan.mesh.tp
        return pass_of_shards(tp) if self.plan.is_sharded or tp > 1 else nullcontext()

    def flush(self) -> None:
        """Make the ranks' models equal, before an evaluation, a checkpoint or an export.

        Raises:
            CopiesDiffer: under DDP, since something beside the optimizer changes a parameter.
        """
        self._check_copies()
        if self.outer is not None:
            self.outer.flush(self.parameters)
        average_buffers(self.parts, self.axes, self.fixed)

    def evaluate(self, batch: Batch, observe: Observe) -> None:
        """Call `observe` with outputs and targets, in eval mode; only on the last stage, once for each tp group.

        Every rank must call it the same number of times, with fillers if it has no data.

        Raises:
            ValueError: as `step`.
        """
        self._check(batch)
        for part in self.parts:
            part.eval()
        is_seen = self.axes is None or self.axes.coordinates["tp"] == 0
        with self._passing():
            self._executor.evaluate(batch, observe if is_seen else _ignore)

    def _check_copies(self) -> None:
        if self.axes is None or not self.plan.is_ddp or self.plan.outer != "none":
            return
        named = [pair for part in self.parts for pair in inner(part).named_parameters()]
        if names := differing_copies(named, self.axes.group("dp_replicate")):
            raise CopiesDiffer(
                f"{', '.join(names)}: the ranks' copies differ, because forward changes them in place by its own "
                "examples; use a parametrization (torch.nn.utils.parametrize), or train on one process"
            )

    def _check(self, batch: Batch) -> None:
        """Check the length of the sequence. All ranks of a tp group have the same inputs, so they fail together."""
        if self._sequence is None or self.axes is None:
            return
        tp = self.axes.mesh.tp
        lengths = [tensor.shape[self._sequence] for tensor in tensors(batch.inputs) if tensor.dim() > self._sequence]
        if wrong := [length for length in lengths if length % tp]:
            raise ValueError(f"tp={tp} must divide the length of the sequence (sequence_parallel), got {wrong[0]}")

    def _settle(self) -> None:
        """Finish the sums of gradients over ranks that the passes leave to the step."""
        if self.axes is not None and self.axes.mesh.tp > 1 and not self.plan.is_sharded:
            settle(self._values, self.axes)
        if self.axes is not None:
            sum_scalars(self._scalars, self.axes, self._synced_axes())
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
        """Return the axes along which gradients are summed in each step."""
        return DP_AXES if self.plan.outer == "none" else ("dp_shard",)

    def _total(self, batch: Batch) -> Total:
        """Start the sum of all ranks' units, and return a function that waits for it; the forward pass hides it."""
        if self.axes is None or self.plan.synced_dp == 1:
            return lambda: batch.count
        group = self.axes.dp_group if self.plan.outer == "none" else self.axes.group("dp_shard")
        total = torch.tensor(batch.count, dtype=torch.float64, device=self.device)  # exact for whole numbers to 2^53
        pending = [dist.all_reduce(total, group=group, async_op=True)]

        def summed() -> torch.Tensor:
            while pending:
                pending.pop().wait()
            return total

        return summed

    def _norm(self) -> torch.Tensor:
        owned = gradients_of(self._values if self._ties is None else self._ties.owned(self._values))
        return total_norm(owned, self.axes, self.device)

    def _global(self, loss: torch.Tensor, units: float | torch.Tensor) -> torch.Tensor:
        if self.axes is None:
            return loss
        share = loss.clone() if self.axes.mesh.pp == 1 else loss.double()  # the last stage alone knows the loss's dtype
        total = self.axes.sum_over(share, "pp", *self._synced_axes())
        if self.plan.outer == "none":
            return total
        both = torch.stack([total * units, torch.as_tensor(units, dtype=total.dtype, device=total.device)])
        weighted, all_units = self.axes.sum_over(both, "dp_replicate")  # each copy has a separate mean
        mean: torch.Tensor = weighted / all_units.clamp(min=torch.finfo(all_units.dtype).tiny)
        return mean

    def _after_first(self, count: float) -> tuple[float, torch.Tensor]:
        """Return the units of all ranks' first micro-batches, and the squared norm of their gradients."""
        units = count
        if self.axes is not None:
            counted = torch.tensor(count, dtype=torch.float64, device=self.device)
            units = float(self.axes.sum_over(counted, *self._synced_axes()))
        own = [scalar.grad for scalar in self._scalars]
        self._settle()
        square = self._norm().square()
        for scalar, gradient in zip(self._scalars, own, strict=True):  # the sum of all micro-batches is still to come
            scalar.grad = gradient
        return units, square


def trained(part: nn.Module) -> list[tuple[str, nn.Parameter]]:
    """Return the parameters of a part that an optimizer moves, by their names in the whole model."""
    return [(name, parameter) for name, parameter in inner(part).named_parameters() if parameter.requires_grad]


def inner(part: nn.Module) -> nn.Module:
    """Return a part without the wrapper of DDP."""
    return part.module if isinstance(part, DistributedDataParallel) else part


def _noise(first: tuple[float, torch.Tensor], units: float, norm: torch.Tensor) -> NoiseSample | None:
    """Return the noise sample; None if the first micro-batches had no units, or all. Their weight was small / units."""
    small, square = first
    if not 0 < small < units:
        return None
    return NoiseSample(small, square * (units / small) ** 2, units, norm.square())


def _ignore(_outputs: Any, _targets: Any, _rows: int) -> None:
    """Discard outputs and targets: another rank observes them already."""
