"""The user's model for many clients at once: with stacked layers where all are known, else under torch.func."""

from collections.abc import Sequence

import torch
from torch import nn
from torch.func import functional_call, vmap
from torch.nn.attention import SDPBackend, sdpa_kernel

from atoll.parallel.arrays import Arrays
from atoll.parallel.local import Local
from atoll.parallel.parameters import state_of
from atoll.simulations.engines.stack import CannotBatch, Place, Stack
from atoll.simulations.engines.stacked_layers import Shared, swap


class Net:
    """A model with the weights of up to k clients.

    Args:
        kind: "stacked" or "mapped".
        model: newly built, on its device; this net owns it.
        local: with the optimizer.
        places: of the trained parameters in a row.
        count: k.
        device: where it computes.

    Raises:
        CannotBatch: a layer that this kind cannot take.
    """

    def __init__(
        self, kind: str, model: nn.Module, local: Local, places: Sequence[Place], count: int, device: str
    ) -> None:
        self.kind, self.count = kind, count
        self.stack = Stack(local, places, count, device)
        self._shared = Shared(self.stack)
        self._names = [name for name, _, _ in places]
        self._model = swap(model, self._shared) if kind == "stacked" else model

    def load(self, version: Arrays) -> None:
        """Take what is not trained: buffers, frozen layers."""
        trained = set(self._names)
        with torch.no_grad():
            for name, tensor in state_of(self._model).items():
                if name in version and name not in trained:
                    tensor.copy_(torch.tensor(version[name]))

    def __call__(self, inputs: torch.Tensor) -> torch.Tensor:
        """(m n, ...) of m clients beside each other -> (m n, ...)

        Raises:
            CannotBatch: the model gives something else.
        """
        outputs = self._model(inputs) if self.kind == "stacked" else self._mapped(inputs)
        if not isinstance(outputs, torch.Tensor) or outputs.shape[:1] != inputs.shape[:1]:
            raise CannotBatch("the model's outputs are no tensor of one row for each example")
        return outputs

    def step(self, loss: torch.Tensor) -> None:
        """Move the weights by the gradients of the sum of all clients' losses."""
        self._shared.backward(loss)

    def _mapped(self, inputs: torch.Tensor) -> torch.Tensor:
        """Only the forward is mapped: its backward is then autograd's own over products of m matrices."""
        leaves = {name: self._shared.leaf(name) for name in self._names}
        each = inputs.unflatten(0, (self.stack.clients, -1))  # type: ignore[no-untyped-call]
        with sdpa_kernel(SDPBackend.MATH):  # the others have no rule for batches of batches
            outputs = vmap(lambda weights, x: functional_call(self._model, weights, (x,)))(leaves, each)
        return outputs.flatten(0, 1) if isinstance(outputs, torch.Tensor) else outputs
