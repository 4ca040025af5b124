"""The user's model for many clients at once, and one step of all of them.

by hand   forward and backward written out: a chain of linear layers and convolutions
stacked   autograd over layers that hold the weights of every client, where all layers are known
mapped    torch.func over the model as it is
"""

from collections.abc import Sequence
from typing import Any

import torch
from torch import nn
from torch.func import functional_call, vmap
from torch.nn.attention import SDPBackend, sdpa_kernel

from atoll.parallel.local_training.parameters import state_of
from atoll.parallel.task.arrays import Arrays
from atoll.parallel.task.local import Local
from atoll.simulations.engines.batched.chain import Chain
from atoll.simulations.engines.batched.measures import Losses, Sizes
from atoll.simulations.engines.batched.stack import CannotBatch, Place, Stack
from atoll.simulations.engines.batched.stacked_layers import Shared, keep_in_range, swap


class Net:
    """A model with the weights of up to k clients.

    Args:
        kind: "by hand", "stacked" or "mapped".
        model: newly built, on its device; this net owns it.
        losses: of the task.
        local: with the optimizer.
        places: of the trained parameters in a row.
        count: k.
        device: where it computes.

    Raises:
        CannotBatch: a layer that this kind cannot take.
    """

    def __init__(
        self,
        kind: str,
        model: nn.Module,
        losses: Losses,
        local: Local,
        places: Sequence[Place],
        count: int,
        device: str,
    ) -> None:
        self.kind, self.count, self._losses = kind, count, losses
        self.stack = Stack(local, places, count, device)
        self._shared = Shared(self.stack)
        self._names = [name for name, _, _ in places]
        self._places = _places_of(model, self._names)
        self._by_hand = _by_hand(model, losses, self.stack) if kind == "by hand" else None
        self._model = swap(model, self._shared) if kind == "stacked" else model
        if kind == "mapped":
            keep_in_range(model)

    def load(self, version: Arrays) -> None:
        """Take what is not trained: buffers, frozen layers."""
        trained = set(self._names)
        with torch.no_grad():
            for name, tensor in state_of(self._model).items():
                if name in version and name not in trained:
                    tensor.copy_(torch.tensor(version[name]))

    def begin(self, start: torch.Tensor, corrections: torch.Tensor | None, *, clients: int, length: int) -> None:
        """New clients, as `Stack.begin`; what is left of a step that failed is forgotten."""
        self._shared.leaves.clear()
        self.stack.begin(start, corrections, clients=clients, length=length)

    def advance(self, inputs: torch.Tensor, targets: torch.Tensor, sizes: Sizes) -> tuple[torch.Tensor, torch.Tensor]:
        """One step of m clients, whose n examples each lie beside each other.

        Args:
            inputs: (m n, ...).
            targets: (m n, ...).
            sizes: (m) examples of each that count, the first ones.

        Returns:
            Each client's mean loss before the step (m), and the outputs (m n, ...).

        Raises:
            CannotBatch: what the model gives, or the loss, cannot be told apart by client.
        """
        if self._by_hand is not None:
            return self._by_hand.advance(inputs, targets, sizes)
        outputs = self._forward(inputs)
        losses = self._losses(outputs, targets, sizes)
        self._shared.backward(losses.sum())
        return losses.detach(), outputs.detach()

    def _forward(self, inputs: torch.Tensor) -> torch.Tensor:
        outputs = self._model(inputs) if self.kind == "stacked" else self._mapped(inputs)
        if not isinstance(outputs, torch.Tensor) or outputs.shape[:1] != inputs.shape[:1]:
            raise CannotBatch("the model's outputs are no tensor of one row for each example")
        return outputs

    def _mapped(self, inputs: torch.Tensor) -> torch.Tensor:
        """Only the forward is mapped: its backward is then autograd's own over products of m matrices."""
        leaves = {place: self._shared.leaf(name) for place, name in self._places.items()}
        each = inputs.unflatten(0, (self.stack.clients, -1))  # type: ignore[no-untyped-call]
        with sdpa_kernel(SDPBackend.MATH):  # the others have no rule for batches of batches
            outputs = vmap(self._alone)(leaves, each)
        return outputs.flatten(0, 1) if isinstance(outputs, torch.Tensor) else outputs

    def _alone(self, weights: dict[str, torch.Tensor], x: torch.Tensor) -> Any:
        """The model of one client; `_places` has the ties, as torch's own fail on a module of two names."""
        return functional_call(self._model, weights, (x,), tie_weights=False)


def _by_hand(model: nn.Module, losses: Losses, stack: Stack) -> Chain:
    if not losses.is_plain:
        raise CannotBatch("the loss is not the plain cross entropy")
    return Chain(model, stack)


def _places_of(model: nn.Module, names: Sequence[str]) -> dict[str, str]:
    """Where trained parameters stand -> their names: tied ones in every module, one of a module of two names once."""
    owners = {id(parameter): name for name, parameter in model.named_parameters() if name in set(names)}
    return {
        f"{prefix}.{own}".lstrip("."): owners[id(parameter)]
        for prefix, module in model.named_modules()
        for own, parameter in module._parameters.items()
        if id(parameter) in owners
    }
