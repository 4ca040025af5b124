"""Forward and backward passes of a model that is one part on a rank: micro-batches one after another.

Three ways to sum gradients over the ranks are supported: none, DDP, and `fully_shard`.
"""

from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass
from typing import Any, Protocol, runtime_checkable

import torch
from torch import nn
from torch.distributed.fsdp import FSDPModule
from torch.distributed.tensor.parallel import loss_parallel
from torch.nn.parallel import DistributedDataParallel

from atoll.parallel.data.batch import Batch, map_tensors, tensors
from atoll.parallel.engine.agreement import Agreement
from atoll.parallel.engine.batchnorm import Real
from atoll.parallel.engine.microbatches import Micro, split
from atoll.parallel.engine.plan import Plan
from atoll.parallel.engine.sharding import whole
from atoll.task.errors import TaskBroken
from atoll.training.data.rows import Forms

Loss = Callable[[Any, Any], torch.Tensor]
"""(outputs, targets) -> mean loss over the batch's units."""


@runtime_checkable
class CountsRows(Protocol):
    """A loss that needs the number of examples."""

    rows: int
    """The examples of a micro-batch, which each call of the loss finds here."""


Observe = Callable[[Any, Any, int], None]
"""(outputs, targets, examples) of a batch that was evaluated."""


Total = Callable[[], float | torch.Tensor]
"""() -> units of the global batch; may wait for other ranks, and may be called repeatedly."""


WholeOutputs = Callable[[torch.Tensor], Any]
"""(the tensor of a pipeline's last stage) -> the outputs of the model, which the loss takes."""


@dataclass(frozen=True, slots=True)
class PipelineShape:
    """The batches that a pipeline takes, and the outputs that it gives."""

    rows: int | None = None
    """The examples of this rank's largest batch; None: no batch is larger than the first."""
    outputs: WholeOutputs | None = None
    """The outputs of a Hugging Face model from those of the last stage, where each stage takes the inputs of the model,
    too; None: of another model, they are the same."""


REENTRANT = (
    "the model checkpoints activations with use_reentrant=True, whose inner backward pass DDP takes for a second one: "
    "set use_reentrant=False, or train with zero=1"
)
"""The refusal of a model that checkpoints by itself."""


class ReadyTwice(ValueError):
    """A parameter got gradients twice in one backward pass, which DDP does not support."""


@contextmanager
def pass_of_copies() -> Iterator[None]:
    """Turn DDP's error about a second gradient, in the block, into one that names the way out.

    Raises:
        ReadyTwice: in place of the `RuntimeError`; no trial pass has met this use.
    """
    try:
        yield
    except RuntimeError as error:
        said = str(first_cause(error))
        if "ready" not in said or ("twice" not in said and "only once" not in said):
            raise
        raise ReadyTwice(REENTRANT) from error


def first_cause(error: BaseException) -> BaseException:
    """Return the first cause of an error, or the error itself; torch's pipeline stages wrap the errors of a pass."""
    while error.__cause__ is not None:
        error = error.__cause__
    return error


def share_of_loss(loss: Loss, outputs: Any, micro: Micro, units: Total) -> torch.Tensor:
    """Return a micro-batch's summand of the mean over all units: its mean times its share of them."""
    if micro.count == 0:  # a mean over nothing; but the passes must be run
        return torch.stack([(in_single(tensor) * 0.0).nan_to_num().sum() for tensor in tensors(outputs)]).sum()
    if isinstance(loss, CountsRows):
        loss.rows = micro.rows
    found = loss(map_tensors(in_single, outputs), micro.targets)
    if not isinstance(found, torch.Tensor) or found.dim():
        kind = f"shape {tuple(found.shape)}" if isinstance(found, torch.Tensor) else type(found).__name__
        raise TaskBroken(
            f"the loss must be a single number, the mean over the batch; got {kind} (where it is a sum and a weight, "
            "return their quotient, and the weight by Task(units=...))"
        )
    total = units()
    if not isinstance(total, torch.Tensor):
        return found if micro.count == total else found * (micro.count / total)
    return found * (micro.count / total).to(found.dtype)


def in_single(tensor: torch.Tensor) -> torch.Tensor:
    """Return float32 for the loss if the model computes in half precision: its sums need the digits."""
    return tensor.float() if tensor.dtype in (torch.bfloat16, torch.float16) else tensor


class Passes:
    """The passes of a model without a pipeline.

    Args:
        model: the one part, wrapped.
        loss: the loss of the task.
        plan: the plan, for accumulation, precision and loss parallelism.
        device: the device of the model.
        agreement: the agreement of the ranks that share the model out; None: they do not.
    """

    def __init__(
        self, model: nn.Module, loss: Loss, plan: Plan, device: torch.device, agreement: Agreement | None = None
    ) -> None:
        self._model, self._loss, self._plan, self._device = model, loss, plan, device
        self._agreement = agreement
        self._forms: Forms = {}
        self._real = Real([model])
        # DDP takes the mean over its ranks, where a sum is needed.
        self._scale = plan.synced_dp if isinstance(model, DistributedDataParallel) else 1

    def train(self, batch: Batch, total: Total, after_first: Callable[[float], None] | None = None) -> torch.Tensor:
        """Compute the parameters' gradients of sum (c / total) x mean loss; return that sum over this rank's batch.

        Args:
            batch: the batch of this rank.
            total: units of the global batch; called when the first outputs are there.
            after_first: called, with this rank's units of the first micro-batch, when the gradients are of all
                ranks' first micro-batches; there are at least two then, each summed over the ranks.
        """
        losses = []
        number = self._plan.microbatches if after_first is None else max(2, self._plan.microbatches)
        micros = split(batch, number, self._forms)
        for index, micro in enumerate(micros):
            is_last = index == len(micros) - 1
            must = is_last or after_first is not None
            self._real.set(micro.real, micro.given)
            with self._synchronizing(must, is_last), self._computing():
                weighted = share_of_loss(self._loss, self._model(micro.inputs), micro, total)
                with self._agreeing(must, is_last):
                    (weighted * self._scale if self._scale != 1 else weighted).backward()  # type: ignore[no-untyped-call]
            losses.append(whole(weighted.detach()))
            if index == 0 and after_first is not None:
                after_first(micro.count)
        return losses[0] if len(losses) == 1 else torch.stack(losses).sum()

    def evaluate(self, batch: Batch, observe: Observe) -> None:
        """Call `observe` with outputs and targets of a batch; fillers are not observed."""
        with torch.no_grad(), casting(self._plan, self._device):
            outputs = self._model(batch.inputs)
            outputs = map_tensors(whole, outputs)
        if batch.count != 0:
            observe(outputs, batch.targets, batch.num_rows)

    @contextmanager
    def _synchronizing(self, must: bool, is_last: bool) -> Iterator[None]:
        """Sum gradients over the ranks in the block's backward pass, or postpone that to the last pass.

        Parameters that ZeRO 1 and 2 have gathered stay gathered from pass to pass, until the optimizer changes them.
        """
        model, stage = self._model, self._plan.zero_stage
        if isinstance(model, DistributedDataParallel) and not must:
            with model.no_sync():
                yield
            return
        if isinstance(model, FSDPModule) and stage < 3:
            model.set_requires_gradient_sync(must or stage == 2)
            model.set_reshard_after_backward(is_last)
        yield

    @contextmanager
    def _agreeing(self, must: bool, is_last: bool) -> Iterator[None]:
        """Sum gradients after a backward pass, not during it, if ranks have called different blocks."""
        agreement, stage = self._agreement, self._plan.zero_stage
        if agreement is None:
            yield
            return
        if agreement.differs:
            assert isinstance(self._model, FSDPModule)
            self._model.set_requires_gradient_sync(False)
            self._model.set_reshard_after_backward(False)
        yield
        if not must and stage == 1:
            agreement.fill()
        elif agreement.differs:
            agreement.reduce(keeps=stage < 3 and not is_last)

    @contextmanager
    def _computing(self) -> Iterator[None]:
        with casting(self._plan, self._device), loss_parallel() if self._plan.loss_parallel else nullcontext():
            yield


def casting(plan: Plan, device: torch.device) -> AbstractContextManager[Any]:
    """Return the context of autocast to the precision of a plan: the same casts on every mesh.

    Casts of a sharded model's weights are not kept from use to use: they would outlive the gathered weights.
    """
    if plan.precision == "fp32":
        return nullcontext()
    return torch.autocast(device.type, dtype=torch.bfloat16, cache_enabled=not plan.is_sharded)
