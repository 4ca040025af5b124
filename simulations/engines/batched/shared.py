"""The state that all stacked layers of one model share: weights, generators, buffers, and the sizes of a step."""

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import numpy as np
import torch
from torch import nn

from atoll.simulations.engines.batched.dropout import Masks
from atoll.simulations.engines.batched.mapped_calls import Call, from_mapped
from atoll.simulations.engines.batched.measures import Sizes
from atoll.simulations.engines.batched.stack import Stack
from atoll.task.arrays import Arrays

BATCH_NORMS = (nn.BatchNorm1d, nn.BatchNorm2d, nn.BatchNorm3d)


def running_of(model: nn.Module) -> dict[str, torch.Tensor]:
    """Return the buffers of all batch norms by name: running mean and variance, count of batches."""
    return {
        f"{prefix}.{name}".lstrip("."): buffer
        for prefix, module in model.named_modules()
        if type(module) in BATCH_NORMS
        for name, buffer in module.named_buffers(recurse=False)
    }


class Running:
    """The buffers of the batch norms of several clients.

    Args:
        buffers: a model's buffers by name, from `running_of`.
        count: the number of clients, k.
        device: the device that computes.
    """

    def __init__(self, buffers: Mapping[str, torch.Tensor], count: int, device: str) -> None:
        self._every = {name: b.new_empty((count, *b.shape), device=device) for name, b in buffers.items()}

    def begin(self, version: Arrays, layers: Sequence[Arrays]) -> None:
        """Set the buffers of a new group of clients, each from the version and its local layers."""
        for name, every in self._every.items():
            if name in version:
                every[:] = torch.tensor(version[name])
                continue
            for row, own in zip(every, layers, strict=False):
                row.copy_(torch.tensor(own[name]))

    def __getitem__(self, name: str) -> torch.Tensor:
        """Return the buffer (k, ...) of all clients."""
        return self._every[name]

    def tensors(self) -> dict[str, torch.Tensor]:
        """Return the buffers (k, ...) of all clients by name."""
        return dict(self._every)

    def arrays(self) -> dict[str, np.ndarray[Any, Any]]:
        """Return all buffers (k, ...) by name."""
        return {name: every.cpu().numpy() for name, every in self._every.items()}


class Shared:
    """State that all stacked layers of one model share.

    Args:
        stack: the weights.
        masks: the clients' generators.
        running: the clients' buffers of batch norms.
        is_mapped: whether torch.func maps the forward.
    """

    sizes: Sizes
    """Number of each client's examples in the current step (m)."""

    def __init__(self, stack: Stack, masks: Masks, running: Running, *, is_mapped: bool) -> None:
        self.stack, self.masks, self.running, self._is_mapped = stack, masks, running, is_mapped
        self.anchor = torch.zeros((), device=next(iter(stack.blocks.values())).device, requires_grad=True)
        """Input that makes autograd visit layers whose inputs and weights need no gradient."""
        self.leaves: dict[str, torch.Tensor] = {}

    def leaf(self, name: str) -> torch.Tensor:
        """Return a parameter (m, ...) as a leaf of autograd; the stack updates it after the backward."""
        if name not in self.leaves:
            self.leaves[name] = self.stack.weights[name].data.requires_grad_()
        return self.leaves[name]

    def call(
        self,
        function: Callable[..., Any],
        *inputs: torch.Tensor | None,
        axes: Sequence[int | None] = (0,),
        out_axes: Sequence[int] = (0,),
    ) -> Any:
        """Call a function with the examples of all clients, from any forward.

        Args:
            function: tensors -> a tensor, or a tuple of tensors.
            inputs: its inputs; if torch.func maps the forward, inputs of one client.
            axes: the axis of each input's examples; None: all clients share the input.
            out_axes: the axis of each output's examples; one: the output is a tensor.
        """
        if not self._is_mapped:
            return function(*inputs)
        outputs = from_mapped(Call(function, axes, out_axes), *inputs)
        return outputs if len(out_axes) > 1 else outputs[0]

    def laid_out(self, y: torch.Tensor) -> torch.Tensor:
        """Return y (m n, L, E) with the memory order (L, m n, E), as in torch, in which a mask is drawn."""
        return y.transpose(0, 1).contiguous().transpose(0, 1) if self.masks.is_watched else y

    def backward(self, loss: torch.Tensor) -> None:
        """Compute the gradients of the sum of all clients' losses, and make the step."""
        loss.backward()  # type: ignore[no-untyped-call]
        for name, leaf in self.leaves.items():
            if leaf.grad is not None:
                self.stack.put(name, leaf.grad)
        self.leaves.clear()
        self.stack.step()
