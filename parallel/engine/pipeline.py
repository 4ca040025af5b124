"""Forward and backward passes through a pipeline: the stages of this rank, and torch's schedule of their passes.

Every micro-batch of a batch has the same shape; a smaller batch is padded, and the loss sees only the real rows. The
targets that the schedule passes around are the numbers of the micro-batches, so that targets may be any tree.
"""

from collections import OrderedDict
from collections.abc import Callable, Sequence
from contextlib import nullcontext
from functools import partial
from typing import Any

import torch
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.pipelining import PipelineStage
from torch.distributed.pipelining.schedules import PipelineScheduleMulti, get_schedule_class
from torch.distributed.tensor.parallel import loss_parallel

from atoll.parallel.data.batch import Batch, map_tensors, tensors
from atoll.parallel.engine.axes import Axes
from atoll.parallel.engine.batchnorm import Real
from atoll.parallel.engine.buffers import unchanged
from atoll.parallel.engine.microbatches import Micro, rows_of, split_padded
from atoll.parallel.engine.passes import Loss, Observe, PipelineShape, Total, casting, in_single, share_of_loss
from atoll.parallel.engine.plan import SCHEDULES, SPLIT, Plan, stages_of
from atoll.parallel.engine.sharding import whole
from atoll.parallel.huggingface.pipeline_stages import INPUTS
from atoll.task.errors import TaskBroken
from atoll.task.randomness import generators_kept
from atoll.training.data.rows import Forms

Form = tuple[tuple[int, ...], torch.dtype]
"""Shape and dtype of a batch's inputs."""

FORMS_MAX = 8
"""The number of forms whose schedules are kept, each with separate buffers for what other stages send."""


class Stage(PipelineStage):
    """Pipeline stage that hides torch's pass for shape inference from buffers, draws and loss, and can be evaluated.

    Without a backward pass two stages of one rank have no gradients to hand over, which torch would demand.
    """

    prepare: Callable[[int], None] = staticmethod(lambda number: None)
    """Number of a micro-batch -> None, called before each of its passes."""

    def get_local_bwd_output(self, mb_index: int) -> Any:
        """Return the gradients of the stage's inputs, for the stage before it on the same rank."""
        return super().get_local_bwd_output(mb_index) if self.has_backward else ()  # type: ignore[no-untyped-call]

    def set_local_bwd_input(self, next_stage_bwd_outputs: Any, mb_index: int) -> None:
        """Accept the gradients of the stage's outputs from the stage after it on the same rank."""
        if self.has_backward:
            super().set_local_bwd_input(next_stage_bwd_outputs, mb_index)

    def forward_one_chunk(self, fwd_chunk_id: int, *args: Any, **kwargs: Any) -> Any:
        """Run the forward pass of a micro-batch."""
        self.prepare(fwd_chunk_id)
        return super().forward_one_chunk(fwd_chunk_id, *args, **kwargs)

    def backward_one_chunk(self, bwd_chunk_id: int, *args: Any, **kwargs: Any) -> Any:
        """Run the backward pass of a micro-batch, which may repeat a part of the forward pass."""
        self.prepare(bwd_chunk_id)
        return super().backward_one_chunk(bwd_chunk_id, *args, **kwargs)

    def _compute_outputs(self, *args: Any, module: nn.Module, **kwargs: Any) -> Any:
        with unchanged(module), generators_kept():
            return super()._compute_outputs(*args, module=module, **kwargs)

    def _backward_metadata_inference(self, loss_fn: Any = None, *args: Any, **kwargs: Any) -> Any:  # not in torch 2.11
        """Find the gradients' shapes without the task's loss, which may keep something from call to call."""
        stand_in = None if loss_fn is None else _sum_of_all
        return super()._backward_metadata_inference(stand_in, *args, **kwargs)

    def _shape_inference(self, *args: Any, **kwargs: Any) -> Any:  # its name in torch 2.11
        with unchanged(self.submod), generators_kept():
            return super()._shape_inference(*args, **kwargs)  # type: ignore[misc]


def _contiguous_gradients(_part: nn.Module, inputs: tuple[Any, ...]) -> None:
    """Make the gradients of a stage's inputs contiguous in the backward pass: the stage before receives them."""
    for tensor in tensors(inputs):
        if tensor.requires_grad and not tensor._backward_hooks:
            tensor.register_hook(torch.Tensor.contiguous)  # type: ignore[no-untyped-call]


def _handed_on(is_split: bool, _part: nn.Module, _inputs: Any, outputs: Any) -> Any:
    """Return a stage's outputs in the form that torch can send: contiguous tensors that are no views.

    Between the two backward passes of a split schedule torch detaches them in place, which is impossible for a view.
    """

    def handed_on(tensor: torch.Tensor) -> torch.Tensor:
        found = tensor.contiguous()
        return found.clone() if is_split and found._is_view() else found

    return map_tensors(handed_on, outputs)


def _sum_of_all(outputs: Any, _target: torch.Tensor) -> torch.Tensor:
    return torch.stack([in_single(tensor).sum() for tensor in tensors(outputs)]).sum()


class Pipeline:
    """The passes of a model in stages.

    Args:
        parts: the stages of this rank, wrapped, in the order of `stages_of`.
        loss: the loss of the task.
        plan: the plan, for the schedule.
        axes: the axes of the mesh.
        device: the device of the stages.
        shape: the shape of its batches and outputs.
    """

    def __init__(
        self,
        parts: Sequence[nn.Module],
        loss: Loss,
        plan: Plan,
        axes: Axes,
        device: torch.device,
        shape: PipelineShape,
    ) -> None:
        for part in parts:
            part.register_forward_pre_hook(_contiguous_gradients)
            part.register_forward_hook(partial(_handed_on, plan.schedule in SPLIT))
        self._parts = list(zip(parts, stages_of(axes.coordinates["pp"], plan), strict=True))
        self._loss, self._plan, self._device, self._axes = loss, plan, device, axes
        self._make_stage = Stage
        self._schedules: OrderedDict[Form, Any] = OrderedDict()
        indices = [index for _, index in self._parts]
        self.is_first, self.is_last = 0 in indices, plan.num_stages - 1 in indices
        self._micros: list[Micro] = []
        self._forms: Forms = {}
        self._total: Total = lambda: 1
        self._observe: Observe | None = None
        self._rows = None if shape.rows is None else -(-shape.rows // plan.microbatches)
        self._outputs = shape.outputs

    def _schedule_of(self, inputs: torch.Tensor) -> Any:
        """Return torch's schedule for inputs of this form: a schedule keeps the shapes of its first batch.

        Collation may pad each batch to its longest example.
        """
        form = (tuple(inputs.shape), inputs.dtype)
        if form not in self._schedules:
            if len(self._schedules) == FORMS_MAX:
                self._schedules.popitem(last=False)
            self._schedules[form] = self._new_schedule()
        self._schedules.move_to_end(form)
        return self._schedules[form]

    def _new_schedule(self) -> Any:
        plan, axes = self._plan, self._axes

        def mesh_of(mesh_dim_names: tuple[str, ...], mesh_layout: Any) -> DeviceMesh:  # torch calls it by these names
            """Return the mesh of a DTensor that the stage before hands on, such as that of a norm under tp."""
            return axes.device_mesh[mesh_dim_names]

        stages = []
        for part, index in self._parts:
            stages.append(
                self._make_stage(part, index, plan.num_stages, self._device, group=axes.group("pp"), get_mesh=mesh_of)
            )
            stages[-1].prepare = partial(self._prepare, Real([part]))
        kind = get_schedule_class(SCHEDULES[plan.schedule][0])
        return kind(
            stages if issubclass(kind, PipelineScheduleMulti) else stages[0],
            n_microbatches=plan.microbatches,
            loss_fn=self._weighted_loss,
            scale_grads=False,  # the losses are weighted by their units
        )

    def train(self, batch: Batch, total: Total, after_first: Callable[[float], None] | None = None) -> torch.Tensor:
        """Train as `passes.Passes.train` does; the loss is 0 on ranks without the last stage.

        Raises:
            ValueError: the inputs are no single tensor; the batch has more rows than `rows`, or than the first one had;
                or `after_first` is given, which a pipeline does not support.
        """
        if after_first is not None:
            raise ValueError("a pipeline cannot measure noise: its gradients are never those of one micro-batch")
        losses: list[torch.Tensor] = []
        self._total = total
        with loss_parallel() if self._plan.loss_parallel else nullcontext():
            self._run(batch, losses, is_training=True)
        if not losses:
            return torch.zeros((), device=self._device)
        return torch.stack([whole(loss.detach()) for loss in losses]).sum()

    def evaluate(self, batch: Batch, observe: Observe) -> None:
        """Call `observe` with outputs and targets of each micro-batch, on the ranks with the last stage."""
        self._observe = observe if batch.count != 0 else lambda _outputs, _targets, _rows: None
        try:
            with torch.no_grad():
                self._run(batch, [], is_training=False)
        finally:
            self._observe = None

    def _run(self, batch: Batch, losses: list[torch.Tensor], *, is_training: bool) -> None:
        if not isinstance(batch.inputs, torch.Tensor):
            raise TaskBroken(f"a pipeline's inputs must be one tensor, got {type(batch.inputs).__name__}")
        number = self._plan.microbatches
        if self._rows is None:
            self._rows = -(-rows_of(batch) // number)
        self._micros = split_padded(batch, number, self._rows, self._forms)
        inputs = torch.cat([micro.inputs for micro in self._micros])
        numbers = torch.arange(number) if self.is_last else None
        options: dict[str, Any] = {"target": numbers, "losses": losses if self.is_last else None}
        if self._outputs is not None:
            options[INPUTS] = inputs
        schedule = self._schedule_of(inputs)
        go = schedule.step if is_training else schedule.eval
        with casting(self._plan, self._device):
            go(*((inputs,) if self.is_first else ()), **options, return_outputs=False)

    def _prepare(self, real: Real, number: int) -> None:
        real.set(self._micros[number].real, self._micros[number].given)

    def _weighted_loss(self, outputs: Any, number: torch.Tensor) -> torch.Tensor:
        micro = self._micros[int(number.reshape(-1)[0])]
        rows = micro.rows
        real = map_tensors(lambda tensor: tensor[:rows] if len(tensor) > rows else tensor, outputs)
        real = real if self._outputs is None else self._outputs(real)
        if self._observe is not None:
            if rows:
                self._observe(map_tensors(whole, real), micro.targets, rows)
            return torch.zeros((), device=self._device)
        return share_of_loss(self._loss, real, micro, self._total)
