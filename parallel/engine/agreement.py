"""The agreement of ranks on the gathers and the gradients of a sharded model of which each may call other modules.

A router picks experts by a rank's examples, and layers may be left out at random. Then `fully_shard` gathers
another block on each rank at the same time: the ranks silently mix the shards of different blocks. So here

- every rank gathers all blocks in one order, that of the model, in each forward pass: a block that is left out is
  gathered before the next one, or at the end;
- after the forward pass one small all-reduce compares the calls. If they differ, the backward pass finds all blocks
  gathered and sums nothing; the gradients are then summed block by block, in one order;
- a parameter without a gradient on this rank counts as zeros, and one without a gradient on any rank keeps none, as in
  one process: the optimizer leaves it alone.

With ZeRO-3 a block is given up after its call, so a second call gathers it again, which may meet another block's gather
on a rank that makes no second call. Unless the model declares the order of its calls (`blueprint.chain`), the ranks
compare before each gather; where they differ, all of them make the lowest one, second calls first, and compare again.
That is a small all-reduce for each block, so it ends when `TRIAL_PASSES` passes have repeated no block: a model that
does so afterwards ends the training, before anything is applied.
"""

import zlib
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch._subclasses.fake_tensor import FakeTensor
from torch.distributed.fsdp import FSDPModule, fully_shard

from atoll.parallel.engine.axes import Axes
from atoll.parallel.engine.blueprint import blueprint_of
from atoll.parallel.engine.plan import SPLIT, Plan
from atoll.parallel.engine.records import records_of
from atoll.training.optimizers.norms import local

TRIAL_PASSES = 16
"""Number of training passes, and of evaluating ones, without a second call of a block, after which none is expected."""


class CallsDiffer(ValueError):
    """The ranks called blocks of a model in a way that the sharding does not support."""


class Agreement:
    """Agreement of the ranks on one sharded part of a model: which blocks are gathered and summed, in which order.

    Args:
        part: after `fully_shard`.
        axes: the axes of the mesh.
        plan: the plan, for the ZeRO stage, the pipeline and the synchronization of the copies.
    """

    def __init__(self, part: nn.Module, axes: Axes, plan: Plan) -> None:
        self._part, self._plan = part, plan
        self._group = axes.dp_group if plan.outer == "none" else axes.group("dp_shard")
        self._num_ranks = dist.get_world_size(self._group)
        self._device = torch.device(axes.device_mesh.device_type)
        self._names = {module: name for name, module in part.named_modules() if isinstance(module, FSDPModule) and name}
        self._blocks: list[Any] = list(self._names)
        self._calls: list[int] = []
        self._num_gathered = 0
        blueprint = blueprint_of(part)
        self._gives_up = plan.zero_stage == 3 and (blueprint.is_planned or not blueprint.chain)
        self._has_repeated = False
        self._num_passes = {True: 0, False: 0}
        self._is_in_forward = False
        self._used: set[nn.Parameter] = set()
        self._is_watching = False
        self.differs = False
        """Whether the last pass called other blocks on another rank: `reduce` must sum its gradients."""
        if self._num_ranks == 1:
            return
        assert isinstance(part, FSDPModule)
        part.set_reduce_scatter_unused_params(True)
        part.register_forward_pre_hook(self._begin, prepend=True)
        for index, block in enumerate(self._blocks):
            block.register_forward_pre_hook(self._before(index), prepend=True)
        part.register_forward_hook(self._end)

    def _begin(self, _module: nn.Module, _inputs: Any) -> None:
        self._calls, self._num_gathered = [], 0
        self._is_in_forward = True

    def _before(self, index: int) -> Any:
        @torch.compiler.disable  # type: ignore[untyped-decorator]
        def hook(_module: nn.Module, _inputs: Any) -> None:
            if not self._is_in_forward:  # recomputation, in a backward pass
                return
            if index in self._calls:
                self._repeat(index)
            elif index >= self._num_gathered:  # `fully_shard` gathers it after this
                self._gather_before(index)
                self._agree(index)
                self._num_gathered = index + 1
            self._calls.append(index)

        return hook

    def _gather_before(self, index: int) -> None:
        """Gather the blocks before this one in the model that were not gathered in this pass."""
        for number in range(self._num_gathered, index):
            self._agree(number)
            self._blocks[number].unshard()
        self._num_gathered = max(self._num_gathered, index)

    def _repeat(self, index: int) -> None:
        """Gather a freed block again for its second call in a pass, once all ranks agree that it is next."""
        if not self._gives_up:
            return
        if not self._compares:
            raise CallsDiffer(
                f"{self._names[self._blocks[index]]} was called twice in a pass, after {TRIAL_PASSES} passes in which "
                "no block was, which zero=3 does not support: set plan.zero = 2, or 1"
            )
        self._agree(-1 - index)

    @property
    def _compares(self) -> bool:
        """Whether the ranks compare their gathers in this pass; the same on all ranks."""
        return self._gives_up and (self._has_repeated or self._num_passes[torch.is_grad_enabled()] < TRIAL_PASSES)

    def _agree(self, gather: int) -> None:
        """Take part in the other ranks' gathers before this one (`gather`: a block's number; -1 - number: repeated).

        All ranks make the first gathers of all blocks in one order, so that only repeated ones can come before.
        """
        while self._compares:
            lowest = -self._highest([-gather], torch.int64)[0]
            self._has_repeated = self._has_repeated or lowest < 0
            if gather == lowest:
                return
            self._join(-1 - lowest)

    def _join(self, index: int) -> None:
        """Gather a block for the ranks that call it again."""
        block = self._blocks[index]
        is_waiting = index < self._num_gathered and index not in self._calls
        block.reshard()
        block.unshard()
        if not is_waiting:
            block.reshard()

    def _highest(self, numbers: list[int], dtype: torch.dtype) -> list[int]:
        """Return the maximum of each number over the ranks; the ranks of a dry run are equal."""
        flags = torch.tensor(numbers, dtype=dtype).to(self._device)
        dist.all_reduce(flags, op=dist.ReduceOp.MAX, group=self._group)
        return numbers if isinstance(flags, FakeTensor) else flags.tolist()

    def _end(self, _module: nn.Module, _inputs: Any, _outputs: Any) -> None:
        self._is_in_forward = False
        self._gather_before(len(self._blocks))
        self._agree(len(self._blocks))
        self._watch()
        self._num_passes[torch.is_grad_enabled()] += 1
        self.differs = self._compare()
        if self.differs:
            self._gather_all()
        elif not torch.is_grad_enabled():
            self._release()

    def _compare(self) -> bool:
        """Return whether ranks called different blocks, or in another order.

        Raises:
            CallsDiffer: they did, and a pipeline gives up blocks between its passes.
        """
        calls = zlib.crc32(repr(self._calls).encode())
        if not sum(self._highest([calls, -calls], torch.int64)):
            return False
        if self._plan.zero_stage == 3 and self._plan.mesh.pp > 1:
            raise CallsDiffer(
                f"ranks called different blocks of a stage ({self._called()} here), which zero=3 does not support "
                "within a pipeline: set plan.zero = 2, or 1"
            )
        return True

    def _called(self) -> str:
        names = [self._names[self._blocks[index]] for index in dict.fromkeys(self._calls)]
        return ", ".join(names) or "none"

    def _gather_all(self) -> None:
        """Gather all blocks, from the same state on all ranks."""
        for block in self._blocks:
            block.reshard()
        if torch.is_grad_enabled():
            for block in self._blocks:
                block.unshard()

    def _release(self) -> None:
        """Free the blocks that were gathered and not called; `fully_shard` has freed the others."""
        if self._plan.zero_stage == 3:
            for block in self._blocks:
                block.reshard()

    def reduce(self, *, keeps: bool) -> None:
        """Sum the gradients of all passes that postponed their sum over the ranks, block by block in one order.

        Args:
            keeps: leave the parameters gathered.
        """
        assert isinstance(self._part, FSDPModule)
        self.fill()
        self._part.set_requires_gradient_sync(True)
        self._part.set_reshard_after_backward(not keeps)
        state: Any = fully_shard.state(self._part)  # type: ignore[attr-defined]
        state._root_post_backward_final_callback()  # as torch's pipeline does after its last backward pass

    @torch.no_grad()
    def fill(self) -> None:
        """Set missing accumulated gradients to zeros in `reduce_dtype`, so that all ranks reduce in one dtype.

        Torch sums what earlier passes left in the type of the sums, and what the last one left in the type of the
        parameters; so must all ranks.
        """
        for parameter in self._sharded() if self._num_ranks > 1 else ():
            if parameter.reduce_dtype is not None and parameter.unsharded_accumulated_grad is None:
                zeros = torch.zeros_like(parameter.unsharded_param, dtype=parameter.reduce_dtype)
                parameter.unsharded_accumulated_grad = zeros

    def _watch(self) -> None:
        """Record, from the first pass on, which parameters get a gradient."""
        if self._is_watching:
            return
        self._is_watching = True
        for parameter in self._sharded():
            parameter.unsharded_param.register_post_accumulate_grad_hook(
                lambda _gathered, sharded=parameter.sharded_param: self._used.add(sharded)
            )

    def _sharded(self) -> list[Any]:
        """Return the `FSDPParam`s (torch's records) of the trained parameters, in the same order on all ranks."""
        return [each for each in records_of((self._part, *self._blocks)) if each.sharded_param.requires_grad]

    def _is_used(self, parameter: nn.Parameter) -> bool:
        """Return whether this rank has used a parameter.

        A schedule that splits the backward pass adds gradients up by itself, unseen: there, zeros mean that it has not.
        """
        if self._plan.mesh.pp == 1 or self._plan.schedule not in SPLIT:
            return parameter in self._used
        shard = None if parameter.grad is None else local(parameter.grad)
        return shard is not None and (isinstance(shard, FakeTensor) or bool(shard.any()))

    @torch.no_grad()
    def settle(self) -> None:
        """Remove the gradients, zeros, of parameters that no rank has used since the last call."""
        if self._num_ranks == 1 or not self._is_watching:
            return
        parameters = [parameter.sharded_param for parameter in self._sharded()]
        used = self._highest([self._is_used(parameter) for parameter in parameters], torch.uint8)
        self._used.clear()
        for parameter, is_used in zip(parameters, used, strict=True):
            if not is_used:
                parameter.grad = None
