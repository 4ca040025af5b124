"""The layers of a chain for many clients as one group, each with its forward and its backward.

Activations are vectors (m, n, features), or images with the channels of all clients side by side, (n, m C, H, W), so
that a convolution becomes a grouped one. On a CPU the channels are last in memory: a grouped convolution of one channel
then takes a quarter of its time, and pooling a third. Legend: m clients, n examples of each, δ the gradient of a
layer's output.

    linear       z = h W^T + b            δ <- δ W; W moves by δ^T h, b by the sum of δ
    convolution  z = h * W + b            as torch has it
    ReLU         h = max(z, 0)            δ <- δ [h > 0]
    pooling      the largest of a window  δ goes to its position

W and b move by the rules of `stack`, each after it has been used in the backward.
"""

from typing import Any, Protocol

import torch
from torch import nn

from atoll.simulations.engines.batched.stack import CannotBatch, Stack
from atoll.simulations.engines.pooling import form_of

_relu_backward: Any = torch.ops.aten.threshold_backward.grad_input


class Layer(Protocol):
    """One layer, which stores the values that its backward needs."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Compute the output of the layer."""
        ...

    def backward(self, delta: torch.Tensor, is_last: bool) -> torch.Tensor:
        """Compute the gradients of the weights from δ of the output; return δ of the input, unless it is the first."""
        ...


class Weights:
    """The weights of a layer.

    Args:
        stack: the weights of all layers.
        name: the name of the layer.
        module: the layer.
    """

    def __init__(self, stack: Stack, name: str, module: nn.Module) -> None:
        prefix = f"{name}." if name else ""
        self.stack, self.weight = stack, f"{prefix}weight"
        self.bias = f"{prefix}bias" if module.bias is not None else None


class Linear(Weights):
    """The layer of nn.Linear: (m, n, in) -> (m, n, out)."""

    def __init__(self, stack: Stack, name: str, module: nn.Linear) -> None:
        super().__init__(stack, name, module)
        stack.allow_factors(self.weight, (module.out_features, module.in_features))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Compute x W^T + b of each client."""
        self._x, weights = x, self.stack.weights
        bias = weights[self.bias].unsqueeze(1) if self.bias else None
        if factors := self.stack.factors.get(self.weight):
            product = factors.forward(x)
            return product if bias is None else product.add_(bias)
        across = weights[self.weight].transpose(1, 2)
        return torch.bmm(x, across) if bias is None else torch.baddbmm(bias, x, across)

    def backward(self, delta: torch.Tensor, is_last: bool) -> torch.Tensor:
        """Move W and b, and return δ W."""
        before = delta
        if not is_last:
            factors = self.stack.factors.get(self.weight)
            before = factors.backward(delta) if factors else torch.bmm(delta, self.stack.weights[self.weight])
        self.stack.linear(self.weight, self.bias, delta, self._x)
        return before


class Convolution(Weights):
    """The layer of nn.Conv2d with zero padding: (n, m C, H, W) -> (n, m C', H', W')."""

    def __init__(self, stack: Stack, name: str, module: nn.Conv2d) -> None:
        if module.padding_mode != "zeros":
            raise CannotBatch(f"{name} pads by {module.padding_mode}")
        super().__init__(stack, name, module)
        self._form = list(module.stride), _padding(name, module), list(module.dilation), False, [0, 0]
        self._groups = module.groups

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Compute a grouped convolution, with the groups of all clients."""
        if x.dim() != 4:
            raise CannotBatch("the input of a convolution is not a batch of images")
        weights = self.stack.weights
        bias = weights[self.bias].flatten() if self.bias else None
        self._x, self._w = laid_out(x), laid_out(weights[self.weight].flatten(0, 1))
        return torch.convolution(self._x, self._w, bias, *self._form, self.stack.clients * self._groups)

    def backward(self, delta: torch.Tensor, is_last: bool) -> torch.Tensor:
        """Move the weights, and return δ of the input."""
        groups, wanted = self.stack.clients * self._groups, [not is_last, True, self.bias is not None]
        before, of_weight, of_bias = torch.ops.aten.convolution_backward(
            laid_out(delta), self._x, self._w, [len(self._w)], *self._form, groups, wanted
        )
        self.stack.put(self.weight, of_weight.view_as(self.stack.weights[self.weight]))
        if self.bias is not None:
            self.stack.put(self.bias, of_bias.view_as(self.stack.weights[self.bias]))
        return delta if is_last else before


def laid_out(images: torch.Tensor) -> torch.Tensor:
    """Return images, or a convolution's weights, in the memory format that computes fastest."""
    is_last = images.device.type == "cpu"
    return images.contiguous(memory_format=torch.channels_last if is_last else torch.contiguous_format)


def _padding(name: str, module: nn.Conv2d) -> list[int]:
    """Return the zeros at each side; "same" has d (k - 1) for a kernel k with dilation d, split between two sides."""
    if not isinstance(module.padding, str):
        return list(module.padding)
    if module.padding == "valid":
        return [0 for _ in module.kernel_size]
    both = [d * (k - 1) for d, k in zip(module.dilation, module.kernel_size, strict=True)]
    if any(zeros % 2 for zeros in both):
        raise CannotBatch(f"{name} pads one side more than the other")
    return [zeros // 2 for zeros in both]


class Rectifier:
    """The layer of nn.ReLU."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Compute max(x, 0), in place."""
        self._y = x.clamp_(min=0)
        return self._y

    def backward(self, delta: torch.Tensor, is_last: bool) -> torch.Tensor:
        """Return δ [h > 0], in place."""
        _relu_backward(delta, self._y, 0, grad_input=delta)
        return delta


class Pool:
    """The layer of nn.MaxPool2d."""

    def __init__(self, module: nn.MaxPool2d) -> None:
        self._form = form_of(module)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Compute the maxima, and store their positions."""
        self._x = laid_out(x)
        pooled: torch.Tensor
        pooled, self._places = torch.ops.aten.max_pool2d_with_indices(self._x, *self._form)
        return pooled

    def backward(self, delta: torch.Tensor, is_last: bool) -> torch.Tensor:
        """Return δ at the positions of the maxima."""
        before: torch.Tensor = torch.ops.aten.max_pool2d_with_indices_backward(
            laid_out(delta), self._x, *self._form, self._places
        )
        return before


class Flatten:
    """The layer of nn.Flatten for images: (n, m C, H, W) -> (m, n, C H W)."""

    def __init__(self, stack: Stack) -> None:
        self._stack = stack

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Return the images as vectors."""
        self._shape = x.shape
        return x.reshape(len(x), self._stack.clients, -1).transpose(0, 1)

    def backward(self, delta: torch.Tensor, is_last: bool) -> torch.Tensor:
        """Return δ in the shape of the images."""
        return laid_out(delta.transpose(0, 1).reshape(self._shape))
