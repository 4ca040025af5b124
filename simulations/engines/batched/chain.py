"""A chain of layers for many clients as one group, with a hand-written backward (`chain_layers`).

Small models spend most of a step on building a graph, large ones much of it on writing gradients that are read once.
Here there is no graph, and plain SGD stores no gradient of a linear layer's matrix. The loss is the plain cross
entropy, each client's mean over its own n examples:

    loss       -log softmax(z)[t]
    backward   δ = (softmax(z) - onehot(t)) / n

A ReLU before a pooling is applied after it: max(max z, 0) = max max(z, 0), on a fraction of the numbers.
"""

from collections.abc import Iterator

import torch
from torch import nn

from atoll.simulations.engines.batched.chain_layers import Convolution, Flatten, Layer, Linear, Pool, Rectifier
from atoll.simulations.engines.batched.measures import Sizes, are_classes, weights
from atoll.simulations.engines.batched.stack import CannotBatch, Stack

FEW_CLASSES = 15
"""Maximum number of classes for the softmax by columns: fewer than the lanes of a processor."""


class Chain:
    """A chain of linear layers, and convolutions before them, with ReLU, max pooling and the plain cross entropy.

    Args:
        model: the model of the task.
        stack: the weights.

    Raises:
        CannotBatch: the model is not such a chain.
    """

    def __init__(self, model: nn.Module, stack: Stack) -> None:
        self._stack = stack
        self._reshaping, self._layers = _read(model, stack)
        self._has_images = isinstance(self._layers[0], Convolution)
        self._shared_by: tuple[bytes, int] | None = None

    def advance(self, inputs: torch.Tensor, targets: torch.Tensor, sizes: Sizes) -> tuple[torch.Tensor, torch.Tensor]:
        """Make one step of m clients with n consecutive examples each.

        Args:
            inputs: (m n, ...).
            targets: (m n), classes.
            sizes: (m), the number of each client's examples; later rows are padding.

        Returns:
            Each client's mean loss before the step (m), and the outputs (m n, classes).

        Raises:
            CannotBatch: targets or inputs have another form.
        """
        if targets.dim() != 1 or not are_classes(targets) or not inputs.is_floating_point():
            raise CannotBatch("the hand-written net needs class numbers as targets and floats as inputs")
        with torch.no_grad():
            x = self._by_client(inputs, len(sizes))
            for layer in self._layers:
                x = layer.forward(x)
            outputs = x.flatten(0, 1)
            delta, losses = _loss_backward(
                outputs, targets, self._share_of(sizes, outputs.view(len(sizes), -1, outputs.shape[1]))
            )
            for number in reversed(range(len(self._layers))):
                delta = self._layers[number].backward(delta, number == 0)
        self._stack.step()
        return losses, outputs

    def _share_of(self, sizes: Sizes, outputs: torch.Tensor) -> torch.Tensor:
        """Return `measures.weights`, cached because most steps have the same sizes as the one before."""
        key = sizes.tobytes(), outputs.shape[1]
        if key != self._shared_by:
            self._shared_by, self._share = key, weights(sizes, outputs)
        return self._share

    def _by_client(self, inputs: torch.Tensor, m: int) -> torch.Tensor:
        """Return inputs (m n, ...) in the shape of the first layer: (m, n, features), or (n, m C, H, W)."""
        for reshaping in self._reshaping:
            inputs = reshaping(inputs)
        if not self._has_images:
            return inputs.reshape(m, -1, inputs.shape[1:].numel())
        return inputs.reshape(m, -1, *inputs.shape[1:]).transpose(0, 1).flatten(1, 2)


def _loss_backward(
    outputs: torch.Tensor, targets: torch.Tensor, share: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor]:
    """Return δ of the outputs (m, n, classes) and the losses (m); `share` is 1 / n for an example, 0 for padding."""
    log = _log_softmax(outputs)
    goal = targets.unsqueeze(1)
    losses = -(log.gather(1, goal).view(len(share), -1) * share).sum(1)
    delta = log.exp_().scatter_add_(1, goal, log.new_full((), -1.0).expand(len(log), 1))
    return delta.view(len(share), -1, delta.shape[1]).mul_(share.unsqueeze(2)), losses


def _log_softmax(outputs: torch.Tensor) -> torch.Tensor:
    """Compute the log-softmax (.., classes); for few classes, torch is five times as fast by columns as by rows."""
    if outputs.shape[1] > FEW_CLASSES:
        return torch.log_softmax(outputs, 1)
    return torch.log_softmax(outputs.t().contiguous(), 0).t().contiguous()


def _read(model: nn.Module, stack: Stack) -> tuple[list[nn.Module], list[Layer]]:
    """Return the leading modules that only reshape examples, and the layers."""
    reshaping: list[nn.Module] = []
    layers: list[Layer] = []
    used: set[int] = set()
    for name, module in _in_order(model, ""):
        if module._forward_hooks or module._forward_pre_hooks or hasattr(module, "parametrizations"):
            raise CannotBatch(f"{name} has hooks")
        if any(True for _ in module.parameters()):
            if id(module) in used or not all(parameter.requires_grad for parameter in module.parameters()):
                raise CannotBatch(f"{name} is used twice, or frozen in part")
            used.add(id(module))
        if not layers and _only_reshapes(module):
            reshaping.append(module)
        else:
            _append(layers, name, module, stack)
    if not layers or not isinstance(layers[-1], Linear):
        raise CannotBatch("the model is not a chain of layers that ends with a linear one")
    return reshaping, layers


def _append(layers: list[Layer], name: str, module: nn.Module, stack: Stack) -> None:
    """Append a layer, if it may follow the previous ones.

    Raises:
        CannotBatch: it may not follow.
    """
    has_images = any(isinstance(layer, Convolution) for layer in layers) and not _are_vectors(layers)
    if type(module) is nn.Linear and (not layers or not has_images):
        layers.append(Linear(stack, name, module))
    elif type(module) is nn.Conv2d and (not layers or has_images):
        layers.append(Convolution(stack, name, module))
    elif type(module) is nn.ReLU and layers and not isinstance(layers[-1], Flatten):
        layers.append(Rectifier())
    elif type(module) is nn.MaxPool2d and has_images and not module.return_indices:
        is_after_relu = isinstance(layers[-1], Rectifier)
        layers.insert(len(layers) - is_after_relu, Pool(module))
    elif type(module) is nn.Flatten and has_images and (module.start_dim, module.end_dim) == (1, -1):
        layers.append(Flatten(stack))
    else:
        raise CannotBatch(f"{name} ({type(module).__name__}) cannot be a layer of such a chain")


def _are_vectors(layers: list[Layer]) -> bool:
    return any(isinstance(layer, Linear | Flatten) for layer in layers)


def _only_reshapes(module: nn.Module) -> bool:
    if type(module) is nn.Unflatten:
        return module.dim != 0
    return type(module) is nn.Flatten and (module.start_dim, module.end_dim) == (1, -1)


def _in_order(module: nn.Module, name: str) -> Iterator[tuple[str, nn.Module]]:
    """Yield the modules of nested nn.Sequential with their names, in the order of their calls."""
    if type(module) is not nn.Sequential or module._forward_hooks or module._forward_pre_hooks:
        yield name, module
        return
    for child, part in module._modules.items():  # unlike `children`, with repeated modules
        assert part is not None
        yield from _in_order(part, f"{name}.{child}".lstrip("."))
