r"""The sum of clipped example gradients on a mesh: from what each layer takes and gives back, never by a mapped model.

Under `fully_shard` a mapped gradient of a model is zero. So the inputs and output gradients of each layer are kept, as
in one process (`captured_gradients`), and the whole gradient of a row is put together over the ranks:

    ||g_i||^2 = sum over tp of the squares of divided weights + squares of replicated weights, once
    sum_i g_i min(1, C / ||g_i||): over the ranks with other rows, into the box that each rank holds

A row lies on one rank of data parallelism, with all of its gradient or, under tp, with that of its part of each weight:
a layer's inputs and output gradients are brought together to where its part of the weight needs them (those of a
sequence that is divided among the ranks, too). Passes are made as often on each rank, with a filler where it has no
rows; a filler adds nothing.

Sources: as in `captured_gradients`.
"""

from collections import OrderedDict
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from functools import partial
from math import prod
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.fsdp import FSDPModule
from torch.distributed.tensor import DTensor, Placement, Replicate, Shard

from atoll.parallel.data.batch import Batch, map_tensors
from atoll.parallel.engine.agreement import Agreement
from atoll.parallel.engine.axes import Axes
from atoll.parallel.engine.passes import casting, in_single
from atoll.parallel.engine.plan import Plan
from atoll.parallel.engine.sharding import whole
from atoll.parallel.engine.step import inner
from atoll.parallel.private.passes import rows_of_pass
from atoll.training.private.captured_gradients import (
    Call,
    NotCaptured,
    capturing,
    factors_of_uses,
    gradients_of_any,
    has_rule,
    losses_of,
    uses_of,
)
from atoll.training.private.example_gradients import Gradients, Loss, columns_of
from atoll.training.private.noise import Box
from atoll.training.private.noised_gradients import part_of
from atoll.training.private.uses import Lookup, Outer, Uses, Whole, squares_of

_HOOKS = ("_forward_hooks", "_forward_pre_hooks", "_backward_hooks", "_backward_pre_hooks")


@dataclass(frozen=True, slots=True)
class _Place:
    """Where a parameter lies."""

    tp: Placement
    """Its part on the tp axis."""
    is_divided: bool
    """Whether `fully_shard` divides it among the ranks with other rows."""
    of_tp: tuple[int, ...]
    """The shape of this rank's part on the tp axis, whole on all others."""
    box: Box
    """What this rank holds of it."""


@dataclass(frozen=True, slots=True)
class _Layer:
    """A module with trained parameters."""

    module: nn.Module
    kind: type[nn.Module]
    """Its class without the wrapper of `fully_shard`."""
    at: Placement
    """The part of its weight on the tp axis."""
    trained: Mapping[str, str]
    """The trained parameters: the attribute's name -> the parameter's name in the model."""


class MeshGradients:
    """The clipped sums of a model's example gradients on a mesh, of which each rank gets what it holds.

    Args:
        part: the model, wrapped by the engine.
        loss: the loss of a row.
        clip_norm: C, above 0.
        plan: the plan of the training.
        axes: the axes of the mesh; None: one process.
        device: the device of the rank.
        at_once: most rows of one pass on a rank.
        agreement: the agreement of the ranks that share the model out; None: they do not.

    Raises:
        NotCaptured: a layer has no rule on this mesh; all of them, with the way out.
    """

    def __init__(
        self,
        part: nn.Module,
        loss: Loss,
        clip_norm: float,
        *,
        plan: Plan,
        axes: Axes | None,
        device: torch.device,
        at_once: int,
        agreement: Agreement | None = None,
    ) -> None:
        self._model, self._loss, self._clip_norm = inner(part), loss, clip_norm
        self._plan, self._axes, self._device, self._agreement = plan, axes, device, agreement
        self._at_once = at_once
        self._tp = axes.device_mesh["tp"] if axes is not None and axes.mesh.tp > 1 else None
        self.parameters = {name: p for name, p in self._model.named_parameters() if p.requires_grad}
        self._places = {name: _place_of(p) for name, p in self.parameters.items()}
        self.boxes = {name: place.box for name, place in self._places.items()}
        """What this rank holds of each parameter."""
        names = {id(p): name for name, p in self.parameters.items()}
        self._layers = {
            name: _Layer(module, _kind_of(module), _part_of_weight(module), trained)
            for name, module in self._model.named_modules()
            if (trained := {each: names[id(p)] for each, p in _own(module) if id(p) in names})
        }
        self._modules = {name: layer.module for name, layer in self._layers.items()}
        if faults := [*self._faults()]:
            raise NotCaptured(*faults)

    def _faults(self) -> Iterator[str]:
        """Yield a sentence for each layer whose parameters another pass would need, and cannot have on this mesh."""
        way_out = "put the parameter into a layer without modules in it, freeze it, or train with DDP (dp_replicate)"
        for name, layer in self._layers.items():
            if has_rule(layer.kind, layer.module):
                continue
            if (self._plan.is_sharded or self._tp is not None) and [*layer.module.children()]:
                kind = layer.kind.__name__
                yield f"{name or kind}: {kind} has parameters beside its layers: {way_out}"
            elif any(isinstance(self._places[each].tp, Shard) for each in layer.trained.values()):
                yield (
                    f"{name}: {layer.kind.__name__} has no rule for the norm of a row's gradient where tp divides its "
                    "parameters: freeze it, or train with tp=1"
                )

    def of_batch(self, batch: Batch) -> Gradients:
        """Return what this rank holds of the global batch's clipped sum; every rank of the mesh must call it.

        Raises:
            NotRows: a tensor's first dimension is no number of examples.
            NotCaptured: a layer's example gradients cannot be had in this way.
        """
        rows = 0 if batch.is_filler else batch.num_rows
        passes = self._most(max(self._plan.accumulate, -(-rows // self._at_once)))
        size, total = rows_of_pass(rows, passes), self._zeros()
        for begin in range(0, passes * size, size):
            count = max(0, min(rows, begin + size) - begin)
            inputs, targets = part_of(batch.inputs, batch.targets, *((begin, begin + count) if count else (0, 1)))
            self._add(total, inputs, targets, max(1, count), is_filler=not count)
        for name, place in self._places.items():
            if self._axes is not None and not place.is_divided:
                self._axes.sum_over(total[name], "dp_replicate", "dp_shard")
        return total

    def _most(self, passes: int) -> int:
        """Return the largest number of passes of a rank."""
        number = torch.tensor(passes, device=self._device)
        if self._axes is not None and self._axes.mesh.dp > 1:
            dist.all_reduce(number, dist.ReduceOp.MAX, group=self._axes.dp_group)
        return int(number)

    def _zeros(self) -> Gradients:
        sizes = {name: [each.stop - each.start for each in box.slices] for name, box in self.boxes.items()}
        return {name: torch.zeros(size, dtype=torch.float64, device=self._device) for name, size in sizes.items()}

    def _add(self, total: Gradients, inputs: Any, targets: Any, rows: int, *, is_filler: bool) -> None:
        """Add the clipped gradients of a pass; of parameters that are not divided those of this rank's rows alone."""
        uses = self._uses(inputs, targets, rows)
        squares = self._squares(uses, rows)
        dropped = torch.ones_like(squares, dtype=torch.bool) if is_filler else ~squares.isfinite()
        factors = factors_of_uses(uses, squares, self._clip_norm, dropped)
        for name, place in self._places.items():
            found = torch.zeros(place.of_tp, dtype=torch.float64, device=self._device)
            for use in uses.pop(name, ()):
                found += use.weighted(factors).reshape(place.of_tp)
            total[name] += self._scattered(found, total[name].shape) if place.is_divided else found

    # ------------------------------------------------------------ passes

    def _uses(self, inputs: Any, targets: Any, rows: int) -> Uses:
        """Return the uses of each parameter's part on tp by some rows."""
        columns_of((inputs, targets), rows)
        values = self._values()
        with capturing(self._modules, rows, is_first=True) as calls, casting(self._plan, self._device):
            outputs = map_tensors(in_single, self._model(inputs))
        with casting(self._plan, self._device):
            total = losses_of(self._loss, outputs, targets, rows).sum()
        if not calls.found:
            raise NotCaptured("the forward pass calls no layer with trained parameters")
        found = self._backward(total, calls.found)
        uses: Uses = {}
        with torch.no_grad():
            for call, gradient in zip(calls.found, found, strict=True):
                if gradient is None:  # an output that the loss does not read
                    continue
                if call.inputs._version != call.version:
                    raise NotCaptured(f"{call.name}: its inputs are changed in place afterwards")
                for name, use in self._of_call(call, gradient, values.get(call.name, {})):
                    uses.setdefault(name, []).append(use)
        return uses

    def _backward(self, total: torch.Tensor, calls: list[Call]) -> tuple[torch.Tensor | None, ...]:
        """Return the output gradients of the calls; no parameter gets a gradient, and no rank sums one."""
        blocks = [module for module in self._model.modules() if isinstance(module, FSDPModule)]
        root = self._model if isinstance(self._model, FSDPModule) else None
        if root is not None:
            root.set_requires_gradient_sync(False)
            root.set_reshard_after_backward(self._agreement is None or not self._agreement.differs)
        found = torch.autograd.grad(total, [call.edge for call in calls], allow_unused=True)
        for block in blocks:
            block.reshard()
        if root is not None:
            root.set_requires_gradient_sync(True)
        return found

    def _values(self) -> dict[str, dict[str, torch.Tensor]]:
        """Return the whole parameters of the layers without a rule, on every rank in the same order."""
        return {
            name: {each: whole(p.detach()) for each, p in _own(layer.module)}
            for name, layer in self._layers.items()
            if not has_rule(layer.kind, layer.module)
        }

    def _of_call(
        self, call: Call, gradient: torch.Tensor, values: dict[str, torch.Tensor]
    ) -> Iterator[tuple[str, Outer | Lookup | Whole]]:
        """Yield the trained parameters of a call by their names, each with the use of this rank's part."""
        layer = self._layers[call.name]
        a, g = (in_single(each) for each in self._local(layer, call.inputs.detach(), gradient.detach()))
        if layer.kind is nn.Embedding and layer.at == Shard(0):
            yield layer.trained["weight"], self._of_words(layer, a, g)
            return
        rest = partial(_of_any, layer, values)
        for name, use in uses_of(layer.kind, layer.module, layer.trained, a, g, rest):
            yield layer.trained[name], use

    def _local(self, layer: _Layer, a: torch.Tensor, g: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """Return the inputs and output gradients that this rank's part of a layer's weight needs."""
        if self._tp is None:
            return a, g
        by_outputs, by_inputs = (Shard(0), Shard(1)) if layer.kind is nn.Linear else (Shard(1), None)
        of_a: Placement = Shard(a.dim() - 1) if layer.kind is nn.Linear and layer.at == by_inputs else Replicate()
        of_g: Placement = (
            Shard(g.dim() - 1) if layer.at == by_outputs and has_rule(layer.kind, layer.module) else Replicate()
        )
        return self._placed(a, of_a), self._placed(g, of_g)

    def _placed(self, tensor: torch.Tensor, placement: Placement) -> torch.Tensor:
        """Return this rank's part of a tensor over tp; a plain tensor is the same on its ranks."""
        assert self._tp is not None
        if not isinstance(tensor, DTensor):
            if isinstance(placement, Replicate):
                return tensor
            tensor = DTensor.from_local(tensor, self._tp, (Replicate(),), run_check=False)
        return tensor.redistribute(placements=(placement,)).to_local()

    def _of_words(self, layer: _Layer, indices: torch.Tensor, g: torch.Tensor) -> Lookup:
        """Return the use of the words that this rank has of an embedding."""
        assert self._axes is not None
        if (padding := getattr(layer.module, "padding_idx", None)) is not None:
            g = g.masked_fill((indices == padding).unsqueeze(-1), 0.0)
        count = self._places[layer.trained["weight"]].of_tp[0]
        words = int(layer.module.num_embeddings)  # type: ignore[arg-type]
        here = indices - self._axes.coordinates["tp"] * -(-words // self._axes.mesh.tp)
        is_elsewhere = (here < 0) | (here >= count)
        g = g.masked_fill(is_elsewhere.unsqueeze(-1), 0.0)
        flat = here.masked_fill(is_elsewhere, 0).flatten(1)
        return Lookup(flat, g.reshape(len(g), -1, g.shape[-1]), count)

    # ------------------------------------------------------------ sums over ranks

    def _squares(self, uses: Uses, rows: int) -> torch.Tensor:
        """Return the squared norm of each row's whole gradient (B,) float64."""
        divided = torch.zeros(rows, dtype=torch.float64, device=self._device)
        replicated = torch.zeros_like(divided)
        for name, of_parameter in uses.items():
            total = divided if isinstance(self._places[name].tp, Shard) else replicated
            total += squares_of(of_parameter)
        if self._axes is not None:
            self._axes.sum_over(divided, "tp")
        return divided + replicated

    def _scattered(self, found: torch.Tensor, shape: torch.Size) -> torch.Tensor:
        """Return this rank's part of a gradient that `fully_shard` divides, summed over the ranks with other rows."""
        assert self._axes is not None
        number = self._axes.mesh.dp_shard
        size = -(-found.shape[0] // number)
        padded = found.new_zeros(size * number, *found.shape[1:])
        padded[: found.shape[0]] = found
        mine = padded.new_empty(size, *found.shape[1:])
        dist.reduce_scatter(mine, [*padded.chunk(number)], group=self._axes.group("dp_shard"))
        return self._axes.sum_over(mine[: shape[0]].contiguous(), "dp_replicate")


def _of_any(
    layer: _Layer, values: dict[str, torch.Tensor], a: torch.Tensor, g: torch.Tensor
) -> dict[str, torch.Tensor]:
    """Return the gradients of the rows of a layer without a rule, from a copy of it that no wrapper sees."""
    module: nn.Module = layer.kind.__new__(layer.kind)
    attributes = {name: value for name, value in vars(layer.module).items() if name != "forward"}
    hooks = {name: OrderedDict[int, Any]() for name in attributes if name.endswith(_HOOKS)}
    vars(module).update({**attributes, **hooks, "_parameters": dict(values)})
    return gradients_of_any(module, {name: values[name] for name in layer.trained}, a, g)


def _own(module: nn.Module) -> list[tuple[str, nn.Parameter]]:
    return [(name, p) for name, p in module._parameters.items() if p is not None]


def _kind_of(module: nn.Module) -> type[nn.Module]:
    """Return the class of a module, without the one that `fully_shard` puts in front."""
    kind = type(module)
    return kind if not isinstance(module, FSDPModule) else next(k for k in kind.__mro__ if k not in (kind, FSDPModule))


def _part_of_weight(module: nn.Module) -> Placement:
    weight = module._parameters.get("weight")
    return Replicate() if weight is None else _place_of(weight).tp


def _place_of(parameter: nn.Parameter) -> _Place:
    shape = tuple(parameter.shape)
    everything = tuple(slice(0, size) for size in shape)
    if not isinstance(parameter, DTensor):
        return _Place(Replicate(), False, shape, Box(shape, everything))
    axes = dict(zip(parameter.device_mesh.mesh_dim_names or (), parameter.placements, strict=True))
    tp = axes.get("tp", Replicate())
    is_divided = not isinstance(axes.get("dp_shard", Replicate()), Replicate)
    of_tp = list(shape)
    if isinstance(tp, Shard):
        number, rank = parameter.device_mesh["tp"].size(), parameter.device_mesh["tp"].get_local_rank()
        size = -(-shape[tp.dim] // number)
        of_tp[tp.dim] = max(0, min(size, shape[tp.dim] - rank * size))
    local = parameter.to_local()
    boxes = [box for box in parameter.__create_chunk_list__() if prod(box.sizes)]  # type: ignore[no-untyped-call]
    slices = (
        tuple(slice(o, o + n) for o, n in zip(boxes[0].offsets, boxes[0].sizes, strict=True))
        if boxes
        else (tuple(slice(0, size) for size in local.shape))
    )
    return _Place(tp, is_divided, tuple(of_tp), Box(shape, slices))
