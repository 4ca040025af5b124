"""A perceptron for many clients at once, its backward written out: small models spend most of a step building a graph.

    forward    h_0 = x,    z_l = h_(l-1) W_l^T + b_l,    h_l = max(z_l, 0)
    loss       -log softmax(z_L)[t], each client's mean over its own n examples
    backward   δ_L = (softmax(z_L) - onehot(t)) / n,    δ_(l-1) = (δ_l W_l) [h_(l-1) > 0]

W and b move by δ_l^T h_(l-1) and sum δ_l as `stack` has it, each as soon as it has carried δ back.
"""

from collections.abc import Iterator
from dataclasses import dataclass

import torch
from torch import nn

from atoll.simulations.engines.measures import Sizes, are_classes, weights
from atoll.simulations.engines.stack import CannotBatch, Stack


@dataclass(frozen=True, slots=True)
class Layer:
    """A linear layer, by the names of its parameters, and whether max(z, 0) follows."""

    weight: str
    bias: str | None
    is_bent: bool = False


class Perceptron:
    """Linear layers with ReLU between them, under the plain cross entropy.

    Args:
        model: of the task.
        stack: the weights.

    Raises:
        CannotBatch: the model is something else.
    """

    def __init__(self, model: nn.Module, stack: Stack) -> None:
        self._layers, self._stack = _layers_of(model), stack

    def advance(self, inputs: torch.Tensor, targets: torch.Tensor, sizes: Sizes) -> tuple[torch.Tensor, torch.Tensor]:
        """One step of m clients, whose n examples each lie beside each other.

        Args:
            inputs: (m n, ...).
            targets: (m n) classes.
            sizes: (m) examples of each that count, the first ones.

        Returns:
            Each client's mean loss before the step (m), and the outputs (m n, classes).

        Raises:
            CannotBatch: targets or inputs of another form.
        """
        if targets.dim() != 1 or not are_classes(targets) or not inputs.is_floating_point():
            raise CannotBatch("the by-hand product takes classes as targets, and floats as inputs")
        m = len(sizes)
        with torch.no_grad():
            hidden = self._forward(inputs.reshape(m, -1, inputs.shape[1:].numel()))
            outputs = hidden.pop().flatten(0, 1)
            delta, losses = _behind(outputs, targets, weights(sizes, outputs.view(m, -1, outputs.shape[1])))
            self._backward(delta, hidden)
        self._stack.step()
        return losses, outputs

    def _forward(self, x: torch.Tensor) -> list[torch.Tensor]:
        """What goes into each layer, and last the outputs: (m, n, ...)"""
        hidden, w = [x], self._stack.weights
        for layer in self._layers:
            across = w[layer.weight].transpose(1, 2)
            x = torch.bmm(x, across) if layer.bias is None else torch.baddbmm(w[layer.bias].unsqueeze(1), x, across)
            if layer.is_bent:
                x.clamp_(min=0)
            hidden.append(x)
        return hidden

    def _backward(self, delta: torch.Tensor, hidden: list[torch.Tensor]) -> None:
        for number in reversed(range(len(self._layers))):
            layer, before = self._layers[number], delta
            if number:
                delta = torch.bmm(delta, self._stack.weights[layer.weight])
                if self._layers[number - 1].is_bent:
                    delta.mul_(hidden[number] > 0)
            self._stack.linear(layer.weight, layer.bias, before, hidden[number])


def _behind(outputs: torch.Tensor, targets: torch.Tensor, share: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """δ (m, n, classes) behind the outputs (m n, classes), and the losses (m); share: 1 / n where an example counts."""
    log = torch.log_softmax(outputs, 1)
    goal = targets.unsqueeze(1)
    losses = -(log.gather(1, goal).view(len(share), -1) * share).sum(1)
    delta = log.exp_().scatter_add_(1, goal, log.new_full((), -1.0).expand(len(log), 1))
    return delta.view(len(share), -1, delta.shape[1]).mul_(share.unsqueeze(2)), losses


def _layers_of(model: nn.Module) -> list[Layer]:
    layers: list[Layer] = []
    used: set[int] = set()
    for name, module in _in_order(model, ""):
        if module._forward_hooks or module._forward_pre_hooks or hasattr(module, "parametrizations"):
            raise CannotBatch(f"{name} has hooks")
        is_free = all(parameter.requires_grad for parameter in module.parameters()) and id(module) not in used
        if type(module) is nn.Linear and is_free:
            used.add(id(module))
            prefix = f"{name}." if name else ""
            layers.append(Layer(f"{prefix}weight", None if module.bias is None else f"{prefix}bias"))
        elif type(module) is nn.ReLU and layers:
            layers[-1] = Layer(layers[-1].weight, layers[-1].bias, is_bent=True)
        elif not (type(module) is nn.Flatten and not layers and (module.start_dim, module.end_dim) == (1, -1)):
            raise CannotBatch(f"{name} ({type(module).__name__}) is no part of a perceptron")
    if not layers or layers[-1].is_bent:
        raise CannotBatch("the model is no perceptron")
    return layers


def _in_order(module: nn.Module, name: str) -> Iterator[tuple[str, nn.Module]]:
    """The parts of nested nn.Sequential, as they are called."""
    if type(module) is not nn.Sequential or module._forward_hooks or module._forward_pre_hooks:
        yield name, module
        return
    for child, part in module._modules.items():  # also one that comes twice
        assert part is not None
        yield from _in_order(part, f"{name}.{child}".lstrip("."))
