"""Calls out of a forward that torch.func maps over clients, with the examples of all clients as one long batch.

In the mapped forward a tensor seems to be one client's, (n, ...). torch asks the rule of an autograd function for the
tensors of all clients, (m, n, ...): so layers without such a rule, and layers whose clients draw from separate
generators, compute with (m n, ...) as in a stacked model.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch

from atoll.simulations.engines.batched.stack import CannotBatch


@dataclass(frozen=True, slots=True)
class Call:
    """A function of the examples of all clients."""

    function: Callable[..., Any]
    """Tensors -> a tensor, or a tuple of tensors."""

    axes: Sequence[int | None]
    """Axis of each input's examples; None: all clients share the input."""

    out_axes: Sequence[int]
    """The axis of each output's examples."""


def from_mapped(call: Call, *inputs: torch.Tensor | None) -> tuple[torch.Tensor, ...]:
    """Call a function from the mapped forward; return the outputs of the one client.

    Raises:
        CannotBatch: no input belongs to a client, or one that must be shared does.
    """
    outputs: tuple[torch.Tensor, ...] = _ForAll.apply(call, *inputs)  # type: ignore[no-untyped-call]
    return outputs


class _ForAll(torch.autograd.Function):
    @staticmethod
    def forward(call: Call, *inputs: torch.Tensor | None) -> tuple[torch.Tensor, ...]:
        raise CannotBatch("a layer with dropout, batch norm, recurrence or attention has no input of a client")

    @staticmethod
    def setup_context(ctx: Any, inputs: Any, output: Any) -> None:
        pass

    @staticmethod
    def vmap(info: Any, in_dims: Sequence[int | None], call: Call, *inputs: torch.Tensor | None) -> Any:
        m = info.batch_size
        merged = [_merged(x, dim, axis, m) for x, dim, axis in zip(inputs, in_dims[1:], call.axes, strict=True)]
        outputs = call.function(*merged)
        outputs = outputs if isinstance(outputs, tuple) else (outputs,)
        split = tuple(y.unflatten(axis, (m, -1)) for y, axis in zip(outputs, call.out_axes, strict=True))
        return split, tuple(call.out_axes)


def _merged(x: torch.Tensor | None, dim: int | None, axis: int | None, m: int) -> torch.Tensor | None:
    """Return the input of all clients, with the examples of all at the axis."""
    if x is None or (dim is None and axis is None):
        return x
    if axis is None:
        raise CannotBatch("the mask of an attention differs between the clients")
    x = x.unsqueeze(0).expand(m, *x.shape) if dim is None else x.movedim(dim, 0)
    return x.movedim(0, axis).flatten(axis, axis + 1)
