"""Layers with the weights of several clients, for the examples of all clients as one long batch.

Between these layers the user's forward computes with a batch of (clients x examples): attention, pooling, activations
and reshaping process each example independently. Legend: m clients, n examples of each, x (m n, ...).

    linear       one product of m matrices (baddbmm), whose backward passes δ and x to the `Stack`
    convolution  a grouped one: (n, m C, ...) with m groups
    norms        the common normalization, then scale and shift of each client
    embedding    a look-up by client and token

`batch_norm`, `recurrent` and `attention` contain more complex layers.
"""

from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import nn
from torch.nn import functional

from atoll.simulations.engines.batched.shared import Shared
from atoll.simulations.engines.batched.stack import Stack


class _Product(torch.autograd.Function):
    """The product x W^T + b of each client; its backward computes δ W, then passes the gradients to the stack."""

    @staticmethod
    def forward(
        ctx: Any, x: torch.Tensor, anchor: torch.Tensor, stack: Stack, weight: str, bias: str | None
    ) -> torch.Tensor:
        ctx.save_for_backward(x)
        ctx.layer = stack, weight, bias
        return times(stack, weight, bias, x)

    @staticmethod
    def backward(ctx: Any, *gradients: torch.Tensor) -> tuple[torch.Tensor | None, None, None, None, None]:
        (delta,), (x,) = gradients, ctx.saved_tensors
        stack, weight, bias = ctx.layer
        back = torch.bmm(delta, stack.weights[weight]) if ctx.needs_input_grad[0] else None
        stack.linear(weight, bias, delta, x)
        return back, None, None, None, None


def times(stack: Stack, weight: str, bias: str | None, x: torch.Tensor) -> torch.Tensor:
    """Compute x W^T + b of each client: (m, n, in) -> (m, n, out), without gradients."""
    across = stack.weights[weight].transpose(1, 2)
    return torch.bmm(x, across) if bias is None else torch.baddbmm(stack.weights[bias].unsqueeze(1), x, across)


def linear(shared: Shared, weight: str, bias: str | None, x: torch.Tensor) -> torch.Tensor:
    """Compute x W^T + b of each client: (m n, ..., in) -> (m n, ..., out)."""
    by_client = x.reshape(shared.stack.clients, -1, x.shape[-1])
    outputs: torch.Tensor = _Product.apply(by_client, shared.anchor, shared.stack, weight, bias)  # type: ignore[no-untyped-call]
    return outputs.reshape(*x.shape[:-1], outputs.shape[-1])


class Stacked(nn.Module):
    """A layer of the model, with the weights of every client.

    Args:
        shared: the state that the model's layers share.
        layer: the layer that it replaces.
        name: the name of the layer; its parameters are <name>.weight and <name>.bias.
    """

    layer: Any
    shared: Shared

    def __init__(self, shared: Shared, layer: Any, name: str) -> None:
        super().__init__()
        object.__setattr__(self, "layer", layer)  # not a child module, because its parameters are unused
        self.shared, self.prefix = shared, f"{name}." if name else ""
        self.weight, self.bias = self.named("weight"), self.named("bias")

    def named(self, parameter: str) -> str | None:
        """Return the full name of one of the layer's parameters; None: the layer lacks it."""
        return self.prefix + parameter if isinstance(getattr(self.layer, parameter, None), nn.Parameter) else None

    @staticmethod
    def obstacles(layer: Any) -> Iterator[str]:
        """Yield the reasons that a layer of this type cannot be stacked."""
        yield from ()

    def __getattr__(self, name: str) -> Any:
        """Return the layer's attribute, which some of torch's modules read from their children."""
        return getattr(self.layer, name)

    def scaled(self, x: torch.Tensor, shape: tuple[int, ...]) -> torch.Tensor:
        """Compute x (m n, ...) times the client's weight plus its bias, each viewed as (m, 1, *shape)."""
        m = self.shared.stack.clients
        y = x.reshape(m, -1, *x.shape[1:])
        y = y * self.shared.leaf(self.weight).view(m, 1, *shape) if self.weight else y
        y = y + self.shared.leaf(self.bias).view(m, 1, *shape) if self.bias else y
        return y.reshape(x.shape)


class Linear(Stacked):
    """The stacked nn.Linear."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Map (m n, ..., in) to (m n, ..., out)."""
        return linear(self.shared, str(self.weight), self.bias, x)


class Convolution(Stacked):
    """The stacked nn.Conv1d, nn.Conv2d and nn.Conv3d."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Map (m n, C, ...) to (m n, C', ...)."""
        m, layer = self.shared.stack.clients, self.layer
        convolve: Callable[..., torch.Tensor] = CONVOLUTIONS[type(layer)]
        grouped = x.reshape(m, -1, *x.shape[1:]).transpose(0, 1).flatten(1, 2)
        weight = self.shared.leaf(str(self.weight)).flatten(0, 1)
        bias = self.shared.leaf(self.bias).flatten() if self.bias else None
        y = convolve(grouped, weight, bias, layer.stride, layer.padding, layer.dilation, m * layer.groups)
        return y.reshape(len(y), m, -1, *y.shape[2:]).transpose(0, 1).flatten(0, 1)


class GroupNorm(Stacked):
    """The stacked nn.GroupNorm."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Normalize (m n, C, ...)."""
        normal = functional.group_norm(x, self.layer.num_groups, None, None, self.layer.eps)
        return self.scaled(normal, (x.shape[1], *(1 for _ in x.shape[2:])))


class LayerNorm(Stacked):
    """The stacked nn.LayerNorm and nn.RMSNorm."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Normalize (m n, ..., *normalized)."""
        shape = tuple(self.layer.normalized_shape)
        if isinstance(self.layer, nn.RMSNorm):
            normal = functional.rms_norm(x, shape, None, self.layer.eps)
        else:
            normal = functional.layer_norm(x, shape, None, None, self.layer.eps)
        return self.scaled(normal, (*(1 for _ in x.shape[1 : x.dim() - len(shape)]), *shape))


class Embedding(Stacked):
    """The stacked nn.Embedding."""

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        """Map whole numbers (m n, ...) to vectors (m n, ..., D)."""
        vectors: torch.Tensor = self.shared.call(self._looked_up, tokens)
        return vectors

    def _looked_up(self, tokens: torch.Tensor) -> torch.Tensor:
        m = self.shared.stack.clients
        clients = torch.arange(m, device=tokens.device).view(m, 1)
        vectors = self.shared.leaf(str(self.weight))[clients, in_range(tokens, self.layer).reshape(m, -1)]
        vectors = vectors.reshape(*tokens.shape, -1)
        if (padding := self.layer.padding_idx) is None:
            return vectors
        return torch.where(tokens[..., None] == padding, vectors.detach(), vectors)

    @staticmethod
    def obstacles(layer: Any) -> Iterator[str]:
        """Yield the options that change a step."""
        if layer.max_norm is not None or layer.scale_grad_by_freq or layer.sparse:
            yield "has max_norm, scale_grad_by_freq or sparse set"


FAR = 2**31 - 1
"""A token beyond every table."""


def in_range(tokens: torch.Tensor, layer: nn.Embedding) -> torch.Tensor:
    """Replace invalid tokens by `FAR`, so that their look-up fails.

    Otherwise a negative token would count from the end, or select from the table of the next client.
    """
    return torch.where((tokens < 0) | (tokens >= layer.num_embeddings), FAR, tokens)


def keep_in_range(model: nn.Module) -> None:
    """Apply `in_range` in all embeddings of a model, because torch.func looks up in one table of all clients."""
    for module in model.modules():
        if isinstance(module, nn.Embedding):
            module.register_forward_pre_hook(lambda layer, inputs: in_range(inputs[0], layer) if inputs else None)


CONVOLUTIONS: dict[type[nn.Module], Callable[..., torch.Tensor]] = {
    nn.Conv1d: functional.conv1d,
    nn.Conv2d: functional.conv2d,
    nn.Conv3d: functional.conv3d,
}
