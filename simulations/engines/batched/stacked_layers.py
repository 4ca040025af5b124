"""Layers with the weights of several clients, for the examples of all clients as one long batch.

Between these layers the user's own forward computes with a batch of (clients x examples): attention, pooling,
activations and reshaping process each example independently. Legend: m clients, n examples of each, x (m n, ...).

    linear       one product of m matrices (baddbmm), whose backward passes δ and x to the `Stack`
    convolution  a grouped one: (n, m C, ...) with m groups
    norms        the common normalization, then scale and shift of each client
    embedding    a look-up by client and token
"""

from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import nn
from torch.nn import functional

from atoll.simulations.engines.batched.stack import CannotBatch, Stack


class Shared:
    """The state that all stacked layers of one model share.

    Args:
        stack: the weights.
    """

    def __init__(self, stack: Stack) -> None:
        self.stack = stack
        self.anchor = torch.zeros((), device=next(iter(stack.blocks.values())).device, requires_grad=True)
        """Input that makes autograd visit layers whose inputs and weights need no gradient."""
        self.leaves: dict[str, torch.Tensor] = {}

    def leaf(self, name: str) -> torch.Tensor:
        """Return a parameter (m, ...) as a leaf of autograd; the stack moves it after the backward."""
        if name not in self.leaves:
            self.leaves[name] = self.stack.weights[name].data.requires_grad_()
        return self.leaves[name]

    def backward(self, loss: torch.Tensor) -> None:
        """Compute the gradients of the sum of all clients' losses, and make the step."""
        loss.backward()  # type: ignore[no-untyped-call]
        for name, leaf in self.leaves.items():
            if leaf.grad is not None:
                self.stack.put(name, leaf.grad)
        self.leaves.clear()
        self.stack.step()


class _Product(torch.autograd.Function):
    """The product x W^T + b of each client; its backward computes δ W, then passes the gradients to the stack."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, anchor: torch.Tensor, layer: "Linear") -> torch.Tensor:
        ctx.save_for_backward(x)
        ctx.layer = layer
        return layer.product(x)

    @staticmethod
    def backward(ctx: Any, *gradients: torch.Tensor) -> tuple[torch.Tensor | None, None, None]:
        (delta,), (x,) = gradients, ctx.saved_tensors
        stack, layer = ctx.layer.shared.stack, ctx.layer
        back = torch.bmm(delta, stack.weights[layer.weight]) if ctx.needs_input_grad[0] else None
        stack.linear(layer.weight, layer.bias, delta, x)
        return back, None, None


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
        object.__setattr__(self, "layer", layer)  # not a child module, because its own parameters are unused
        self.shared = shared
        prefix = f"{name}." if name else ""
        self.weight: str | None = prefix + "weight" if layer.weight is not None else None
        self.bias: str | None = prefix + "bias" if getattr(layer, "bias", None) is not None else None

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
        by_client = x.reshape(self.shared.stack.clients, -1, x.shape[-1])
        outputs: torch.Tensor = _Product.apply(by_client, self.shared.anchor, self)  # type: ignore[no-untyped-call]
        return outputs.reshape(*x.shape[:-1], outputs.shape[-1])

    def product(self, x: torch.Tensor) -> torch.Tensor:
        """Map (m, n, in) to (m, n, out)."""
        weights = self.shared.stack.weights
        across = weights[str(self.weight)].transpose(1, 2)
        return torch.bmm(x, across) if self.bias is None else torch.baddbmm(weights[self.bias].unsqueeze(1), x, across)


class Convolution(Stacked):
    """The stacked nn.Conv1d, nn.Conv2d and nn.Conv3d."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Map (m n, C, ...) to (m n, C', ...)."""
        m, layer = self.shared.stack.clients, self.layer
        convolve: Callable[..., torch.Tensor] = _CONVOLUTIONS[type(layer)]
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
        m = self.shared.stack.clients
        clients = torch.arange(m, device=tokens.device).view(m, 1)
        vectors = self.shared.leaf(str(self.weight))[clients, in_range(tokens, self.layer).reshape(m, -1)]
        return vectors.reshape(*tokens.shape, -1)


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


_CONVOLUTIONS: dict[type[nn.Module], Callable[..., torch.Tensor]] = {
    nn.Conv1d: functional.conv1d,
    nn.Conv2d: functional.conv2d,
    nn.Conv3d: functional.conv3d,
}

_STACKED: dict[type[nn.Module], type[Stacked]] = {
    nn.Linear: Linear,
    **dict.fromkeys(_CONVOLUTIONS, Convolution),
    nn.GroupNorm: GroupNorm,
    nn.LayerNorm: LayerNorm,
    nn.RMSNorm: LayerNorm,
    nn.Embedding: Embedding,
}


def swap(model: nn.Module, shared: Shared) -> nn.Module:
    """Replace all trained layers of a model by stacked ones; return the model, or the layer that replaces it.

    Raises:
        CannotBatch: a layer cannot be replaced; the message names the first one.
    """
    owners: dict[int, str] = {}
    for name, module in list(model.named_modules(remove_duplicate=False)):
        trained = [parameter for parameter in module.parameters(recurse=False) if parameter.requires_grad]
        if not trained:
            continue
        if reason := "".join(_obstacles(module)) or ("is used twice" if _is_used(owners, trained, name) else ""):
            raise CannotBatch(f"{name or 'the model'} ({type(module).__name__}) {reason}")
        stacked = _STACKED[type(module)](shared, module, name)
        if not name:
            return stacked
        model.set_submodule(name, stacked)
    return model


def _is_used(owners: dict[int, str], parameters: list[nn.Parameter], name: str) -> bool:
    is_used = any(id(parameter) in owners for parameter in parameters)
    owners.update((id(parameter), name) for parameter in parameters)
    return is_used


def _obstacles(module: Any) -> Iterator[str]:
    """Yield the reason that a layer cannot be stacked, if there is one."""
    if type(module) not in _STACKED:
        yield "has weights of its own that only torch.func can stack"
    elif not all(parameter.requires_grad for parameter in module.parameters()):
        yield "is frozen in part"
    elif module._forward_hooks or module._forward_pre_hooks or hasattr(module, "parametrizations"):
        yield "has hooks"
    elif getattr(module, "padding_mode", "zeros") != "zeros":
        yield f"pads by {module.padding_mode}"
    elif isinstance(module, nn.Embedding) and (
        module.padding_idx is not None or module.max_norm is not None or module.scale_grad_by_freq or module.sparse
    ):
        yield "has padding_idx, max_norm, scale_grad_by_freq or sparse set"


def obstacles_to_batching(model: nn.Module) -> Iterator[str]:
    """Yield the reasons that no kind of net supports a model, as sentences for a person."""
    for name, module in model.named_modules():
        if isinstance(module, nn.modules.batchnorm._NormBase) and not isinstance(
            module, nn.modules.instancenorm._InstanceNorm
        ):
            yield f"{name} ({type(module).__name__}) mixes the examples of a batch"
        if isinstance(module, nn.modules.dropout._DropoutNd) and module.p > 0:
            yield f"{name} ({type(module).__name__}) draws from a generator, and each client has its own"
    for name, parameter in model.named_parameters():
        if parameter.requires_grad and parameter.dtype != torch.float32:
            yield f"{name} is {parameter.dtype}, and only float32 is stacked"
    if not any(parameter.requires_grad for parameter in model.parameters()):
        yield "nothing in the model is trained"
