r"""The sum of clipped example gradients from one pass over a batch: each layer's inputs and output gradients are kept.

One forward pass, one backward pass to the outputs of the layers with trained parameters, the norms of rows from what
the layers kept (`uses`), and the sum with each row's output gradients times min(1, C / norm). No gradient of a row
exists for linear layers, convolutions in two dimensions and embeddings; for any other layer `torch.func` gives it.

It holds where each trained parameter is used by its module's `forward` alone, with one row for each example in the
module's inputs and outputs. A model whose rows go other ways (recurrent layers, `functional.linear` with the weight
of another module) needs `example_gradients`; `checks` compares both with single rows before the first step.

Source: Lee and Kifer 2021 (arXiv 2009.03106); Bu et al. 2023, "Differentially Private Optimization on Large Model at
Small Cost" (arXiv 2210.00038), for the sum without a second backward pass.
"""

from collections.abc import Callable, Collection, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import torch
from torch import nn
from torch.autograd.graph import GradientEdge, get_gradient_edge
from torch.func import functional_call, vjp, vmap

from atoll.ground.faults import Refused
from atoll.training.data.trees import map_tensors
from atoll.training.private.example_gradients import Gradients, Loss, columns_of, factors_of
from atoll.training.private.uses import Lookup, Outer, Uses, Whole, squares_of
from atoll.training.trials.contract import one_loss

Rest = Callable[[torch.Tensor, torch.Tensor], dict[str, torch.Tensor]]
"""(inputs, output gradients) of rows -> the rows' gradients, by the names of a module's trained parameters."""


class NotCaptured(Refused):
    """A layer whose example gradients do not follow from its inputs and output gradients; the message names it."""


@dataclass(slots=True)
class Call:
    """A call of a module: its inputs, and the place of its output in the graph."""

    name: str
    module: nn.Module
    inputs: torch.Tensor
    version: int
    edge: GradientEdge
    gradient: torch.Tensor | None = None


@dataclass(slots=True)
class Calls:
    """The calls of a forward pass on some rows."""

    rows: int
    found: list[Call] = field(default_factory=list)


class CapturedGradients:
    """The clipped sum of a model's example gradients; the same interface as `ExampleGradients`.

    Args:
        model: the model, in training mode on its device.
        loss: the loss of a row.
        clip_norm: C, above 0.
    """

    def __init__(self, model: nn.Module, loss: Loss, clip_norm: float) -> None:
        self._model, self._loss, self._clip_norm = model, loss, clip_norm
        self.parameters = {name: p for name, p in model.named_parameters() if p.requires_grad}
        self._names = {id(p): name for name, p in self.parameters.items()}
        self._modules = trained_modules(model)

    def clipped_sum(self, inputs: Any, targets: Any, rows: int) -> Gradients:
        """Return the sum of the clipped gradients of a batch, float64 by the parameter's name; of no rows zeros.

        Raises:
            NotRows: a tensor's first dimension is not `rows`.
            NotCaptured: a layer's example gradients cannot be had in this way.
        """
        total = {name: torch.zeros_like(p, dtype=torch.float64) for name, p in self.parameters.items()}
        if not rows:
            return total
        uses = self._uses(inputs, targets, rows)
        squares = torch.stack([squares_of(of_parameter) for of_parameter in uses.values()]).sum(0)
        factors = factors_of_uses(uses, squares, self._clip_norm, ~squares.isfinite())
        for name, of_parameter in uses.items():
            for use in of_parameter:
                total[name] += use.weighted(factors).reshape(total[name].shape)
        return total

    def _uses(self, inputs: Any, targets: Any, rows: int) -> Uses:
        columns_of((inputs, targets), rows)
        with capturing(self._modules, rows) as calls:
            outputs = self._model(inputs)
        total = losses_of(self._loss, outputs, targets, rows).sum()
        found = torch.autograd.grad(total, [call.edge for call in calls.found], allow_unused=True)
        uses: Uses = {}
        for call, gradient in zip(calls.found, found, strict=True):
            if gradient is None:  # an output that the loss does not read
                continue
            if call.inputs._version != call.version:
                raise NotCaptured(f"{call.name}: its inputs are changed in place afterwards")
            module = call.module
            trained = {name: p for name, p in module.named_parameters(recurse=False) if id(p) in self._names}
            rest = partial(gradients_of_any, module, {name: p.detach() for name, p in trained.items()})
            for name, use in uses_of(type(module), module, trained, call.inputs.detach(), gradient.detach(), rest):
                uses.setdefault(self._names[id(trained[name])], []).append(use)
        if not uses:
            raise NotCaptured("the loss depends on no layer with trained parameters")
        return uses


def trained_modules(model: nn.Module) -> dict[str, nn.Module]:
    """Return the modules that have trained parameters beside those of the modules in them, by name."""
    return {
        name: module
        for name, module in model.named_modules()
        if any(p.requires_grad for p in module.parameters(recurse=False))
    }


def factors_of_uses(uses: Uses, squares: torch.Tensor, clip_norm: float, dropped: torch.Tensor) -> torch.Tensor:
    """Return min(1, C / norm) of each row's whole gradient (B,), and set the gradients of some rows to zero.

    Args:
        uses: of the rows; changed in place.
        squares: the squared norms of the rows' whole gradients (B,).
        clip_norm: C.
        dropped: the rows that count for nothing (B,), which all are whose norm is not finite.
    """
    if bool(dropped.any()):
        squares = squares.masked_fill(dropped, 0.0)
        for use in (use for of_parameter in uses.values() for use in of_parameter):
            use.drop(dropped)
    return factors_of(squares.sqrt(), clip_norm)


def losses_of(loss: Loss, outputs: Any, targets: Any, rows: int) -> torch.Tensor:
    """Return the loss of each row (B,)."""
    columns = columns_of((outputs, targets), rows)

    def of_row(row: tuple[torch.Tensor, ...]) -> torch.Tensor:
        batch = iter([column.unsqueeze(0) for column in row])
        output, target = map_tensors(lambda _: next(batch), (outputs, targets))
        return one_loss(loss(output, target))

    losses: torch.Tensor = vmap(of_row, randomness="different")(columns)
    return losses


@contextmanager
def capturing(modules: Mapping[str, nn.Module], rows: int, *, is_first: bool = False) -> Iterator[Calls]:
    """Keep the calls of some modules in the block.

    Args:
        modules: by name.
        rows: the rows of the forward pass.
        is_first: see the outputs before any other hook.

    Raises:
        NotCaptured: by a call with other inputs or outputs than one tensor of rows.
    """
    calls = Calls(rows)
    handles = [
        module.register_forward_hook(_keeping(calls, name), with_kwargs=True, prepend=is_first)
        for name, module in modules.items()
    ]
    try:
        yield calls
    finally:
        for handle in handles:
            handle.remove()


def _keeping(calls: Calls, name: str) -> Callable[[nn.Module, Any, Any, Any], None]:
    def keep(module: nn.Module, inputs: Any, named: Any, output: Any) -> None:
        if not torch.is_grad_enabled():
            return
        check_call(name, inputs, named, output, calls.rows)
        if not output.requires_grad:
            raise NotCaptured(f"{name}: its output has no gradient")
        calls.found.append(Call(name, module, inputs[0], inputs[0]._version, get_gradient_edge(output)))

    return keep


def check_call(name: str, inputs: Any, named: Any, output: Any, rows: int) -> None:
    """Check that a call of a module takes and returns one tensor of rows; arguments as of a forward hook.

    Raises:
        NotCaptured: it does not.
    """
    is_plain = len(inputs) == 1 and not named and isinstance(inputs[0], torch.Tensor)
    if not is_plain or not isinstance(output, torch.Tensor):
        raise NotCaptured(f"{name}: it takes or returns something else than one tensor")
    if len(inputs[0]) != rows or len(output) != rows:
        raise NotCaptured(f"{name}: the first dimension of its inputs or outputs is no row")


def uses_of(
    kind: type[nn.Module], module: nn.Module, names: Collection[str], a: torch.Tensor, g: torch.Tensor, rest: Rest
) -> Iterator[tuple[str, Outer | Lookup | Whole]]:
    """Yield the trained parameters of a module, by their attributes' names, each with its use in a call.

    Args:
        kind: the module's class without wrappers.
        module: the module, for its settings; its parameters are not read.
        names: its trained parameters.
        a: the inputs of the rows.
        g: the output gradients of the rows.
        rest: the gradients of the rows where no rule has them.
    """
    if kind is nn.Linear:
        if "weight" in names:
            yield "weight", Outer(_positions(a), _positions(g))
        if "bias" in names:
            yield "bias", Whole(_positions(g).sum(1))
    elif isinstance(module, nn.Conv2d) and kind is nn.Conv2d and _is_unfolded(module):
        by_position = g.flatten(2).transpose(1, 2)
        if "weight" in names:
            shape = dict(dilation=module.dilation, padding=module.padding, stride=module.stride)
            patches = torch.nn.functional.unfold(a, module.kernel_size, **shape)  # type: ignore[arg-type]
            yield "weight", Outer(patches.transpose(1, 2), by_position)
        if "bias" in names:
            yield "bias", Whole(by_position.sum(1))
    elif isinstance(module, nn.Embedding) and kind is nn.Embedding and _is_plain(module):
        if module.padding_idx is not None:
            g = g.masked_fill((a == module.padding_idx).unsqueeze(-1), 0.0)
        yield "weight", Lookup(a.flatten(1), g.reshape(len(g), -1, g.shape[-1]), module.num_embeddings)
    else:
        yield from ((name, Whole(found)) for name, found in rest(a, g).items())


def has_rule(kind: type[nn.Module], module: nn.Module) -> bool:
    """Return whether the uses of a module follow from its inputs and output gradients, without its parameters."""
    if isinstance(module, nn.Conv2d):
        return kind is nn.Conv2d and _is_unfolded(module)
    return kind is nn.Linear or (isinstance(module, nn.Embedding) and kind is nn.Embedding and _is_plain(module))


def _is_unfolded(module: nn.Conv2d) -> bool:
    return not isinstance(module.padding, str) and module.groups == 1 and module.padding_mode == "zeros"


def _is_plain(module: nn.Embedding) -> bool:
    return module.max_norm is None and not module.scale_grad_by_freq and not module.sparse


def _positions(tensor: torch.Tensor) -> torch.Tensor:
    """Return (B, ..., width) as (B, T, width)."""
    return tensor.reshape(len(tensor), -1, tensor.shape[-1])


def gradients_of_any(
    module: nn.Module, values: dict[str, torch.Tensor], a: torch.Tensor, g: torch.Tensor
) -> dict[str, torch.Tensor]:
    """Return the gradients of each row of any module, by its parameters' names.

    Args:
        module: the module.
        values: its trained parameters.
        a: the inputs of the rows.
        g: the output gradients of the rows.

    Raises:
        NotCaptured: its forward pass draws random numbers, which another pass would draw otherwise.
    """

    def of_row(row: torch.Tensor, gradient: torch.Tensor) -> dict[str, torch.Tensor]:
        backward: Any = vjp(lambda values: functional_call(module, values, (row.unsqueeze(0),)), values)[1]
        return dict(backward(gradient.unsqueeze(0))[0])

    try:
        found: dict[str, torch.Tensor] = vmap(of_row, randomness="error")(a, g)
    except RuntimeError as error:
        raise NotCaptured(f"{type(module).__name__}: {str(error).splitlines()[0]}") from error
    return {name: each.detach() for name, each in found.items()}
