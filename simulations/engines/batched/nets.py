"""The user's model with the weights of many clients, and one step of all of them.

by hand   a written-out forward and backward, for a chain of linear layers and convolutions
stacked   autograd over layers with the weights of every client, for models of known layers
mapped    torch.func over the model, whose layers of `swapping.CALLED` are stacked
"""

from collections.abc import Collection, Sequence
from contextlib import nullcontext
from typing import Any

import torch
from torch import nn
from torch.func import functional_call, vmap
from torch.nn.attention import SDPBackend, sdpa_kernel

from atoll.simulations.engines.batched.chain import Chain
from atoll.simulations.engines.batched.dropout import Dropouts, Masks
from atoll.simulations.engines.batched.measures import Losses, Sizes
from atoll.simulations.engines.batched.outputs import by_client, check_rows, filled
from atoll.simulations.engines.batched.shared import Running, Shared, running_of
from atoll.simulations.engines.batched.stack import CannotBatch, Follower, Place, Stack
from atoll.simulations.engines.batched.stacked_layers import keep_in_range
from atoll.simulations.engines.batched.swapping import swap
from atoll.task.arrays import Arrays
from atoll.task.local import Local
from atoll.training.data.trees import map_tensors, tensors
from atoll.training.model.parameters import state_of


class Net:
    """Model with the weights of up to k clients.

    Args:
        kind: "by hand", "stacked" or "mapped".
        model: a newly built model on its device, which the net modifies.
        losses: the loss of the task.
        local: the settings of the optimizer.
        places: the columns of the trained parameters in a row.
        count: the number of clients, k.
        masks: the clients' generators, on the device that computes.
        follower: changes gradients and follows steps; may be None.

    Raises:
        CannotBatch: this kind of net does not support a layer of the model.
    """

    def __init__(
        self,
        kind: str,
        model: nn.Module,
        losses: Losses,
        local: Local,
        places: Sequence[Place],
        count: int,
        masks: Masks,
        follower: Follower | None = None,
    ) -> None:
        self.kind, self.count, self._losses, self._masks = kind, count, losses, masks
        self.stack = Stack(local, places, count, masks.device, follower)
        self.running = Running(running_of(model), count, masks.device)
        is_mapped = kind == "mapped"
        self._shared = Shared(self.stack, masks, self.running, is_mapped=is_mapped)
        self._dropouts = Dropouts(masks, self._shared.call)
        self._names = [name for name, _, _ in places]
        self._by_hand = _by_hand(model, losses, self.stack) if kind == "by hand" else None
        self._model = model if self._by_hand else swap(model, self._shared, is_mapped=is_mapped)
        self._places = _places_of(self._model, self._names)
        if is_mapped:
            keep_in_range(self._model)

    def load(self, version: Arrays) -> None:
        """Load the tensors of a version that are not trained: buffers, frozen layers."""
        load_untrained(self._model, version, set(self._names))

    def begin(self, start: torch.Tensor, corrections: torch.Tensor | None, *, clients: int, length: int) -> None:
        """Set the weights of a new group of clients as `Stack.begin` does, and discard the remains of a failed step."""
        self._shared.leaves.clear()
        self.stack.begin(start, corrections, clients=clients, length=length)

    def advance(self, inputs: torch.Tensor, targets: torch.Tensor, sizes: Sizes) -> tuple[torch.Tensor, Any]:
        """Make one step of m clients with n consecutive examples each.

        Args:
            inputs: (m n, ...).
            targets: (m n, ...).
            sizes: (m), the number of each client's examples; later rows are padding.

        Returns:
            Each client's mean loss before the step (m), and the outputs, a tree of tensors (m n, ...).

        Raises:
            CannotBatch: the outputs of the model, or the loss, cannot be divided by client.
        """
        if self._by_hand is not None:
            return self._by_hand.advance(inputs, targets, sizes)
        self._shared.sizes = sizes
        self._masks.take(sizes)
        with self._dropouts if self._masks.is_watched else nullcontext():
            outputs = self._forward(inputs)
        losses, objectives = self._losses.both(outputs, targets, sizes)
        self._shared.backward(objectives.sum())
        return losses.detach(), map_tensors(torch.Tensor.detach, outputs)

    def _forward(self, inputs: torch.Tensor) -> Any:
        outputs = self._model(inputs) if self.kind == "stacked" else self._mapped(inputs)
        check_rows(outputs, len(inputs))
        return outputs

    def _mapped(self, inputs: torch.Tensor) -> Any:
        """Map only the forward, so that the backward is autograd's, over products of m matrices."""
        leaves = {place: self._shared.leaf(name) for place, name in self._places.items()}
        form: list[Any] = []

        def alone(weights: dict[str, torch.Tensor], x: torch.Tensor) -> tuple[torch.Tensor, ...]:
            outputs = functional_call(self._model, weights, (x,), tie_weights=False)  # `_places` handles the ties
            check_rows(outputs, len(x))
            form.append(outputs)
            return tuple(tensors(outputs))

        with sdpa_kernel(SDPBackend.MATH):  # the other kernels have no rule for batches of batches
            found = vmap(alone)(leaves, by_client(inputs, self.stack.clients))
        return filled(form[0], (tensor.flatten(0, 1) for tensor in found))


def load_untrained(model: nn.Module, version: Arrays, trained: Collection[str]) -> None:
    """Load the tensors of a version into a model, except for the trained ones."""
    with torch.no_grad():
        for name, tensor in state_of(model).items():
            if name in version and name not in trained:
                tensor.copy_(torch.tensor(version[name]))


def _by_hand(model: nn.Module, losses: Losses, stack: Stack) -> Chain:
    if not losses.is_plain:
        raise CannotBatch("the loss is not the plain cross entropy")
    return Chain(model, stack)


def _places_of(model: nn.Module, names: Sequence[str]) -> dict[str, str]:
    """Return the names of trained parameters by their modules' places; a tied parameter has a place in each module."""
    owners = {id(parameter): name for name, parameter in model.named_parameters() if name in set(names)}
    return {
        f"{prefix}.{attribute}".lstrip("."): owners[id(parameter)]
        for prefix, module in model.named_modules()
        for attribute, parameter in module._parameters.items()
        if id(parameter) in owners
    }
