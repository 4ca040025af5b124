"""The weights of many clients side by side, and the local optimizer that moves all of them in one step.

    W   (k, T) float32    row i: all trained parameters of client i, stored as a block (k, n) for each parameter
    G   (k, T) float32    their gradients; plain SGD needs no G, because products add to W directly:

        W_i <- W_i - η δ_i^T x_i,    then with SCAFFOLD  W_i <- W_i - η (c - c_i)

Legend: η learning rate, δ_i the gradient of a linear layer's output, x_i its input, c - c_i SCAFFOLD's correction.
Without G, a gradient of 200,000 numbers is never written, which saves half of such a step's time. W is in blocks,
because a product of many matrices into columns of wider rows is computed one by one, at a third of the speed. The W of
a linear layer whose clients all begin with the same weights is not even computed until it is needed: see `factors`.

Clients are sorted by their number of steps: the ones still training always come first.
"""

from collections.abc import Mapping, Sequence
from typing import Any, Protocol

import numpy as np
import torch

from atoll.simulations.engines.batched.factors import Factors, pay
from atoll.task.local import Local

BETAS = (0.9, 0.999)
EPSILON = 1e-8
"""Constants of Adam, the defaults of torch.optim."""

Array = np.ndarray[Any, Any]

Place = tuple[str, slice, tuple[int, ...]]
"""Parameter's name, its columns and its shape."""

Blocks = Mapping[str, torch.Tensor]


class CannotBatch(Exception):
    """Error: clients cannot be trained as one group; the message is a sentence for the user."""


class Follower(Protocol):
    """Hooks of an algorithm in a step."""

    def change_gradients(self, gradients: dict[str, torch.Tensor]) -> None:
        """Replace the gradients (m, ...) in place, before they are clipped."""
        ...

    def stepped(self) -> None:
        """Call the algorithm's hook that follows the step."""
        ...


def is_plain(local: Local) -> bool:
    """Return whether a step is W - η G alone, so that products may add to the weights directly.

    Decay and the proximal term would have to scale W by a factor so near 1 that rounding errors accumulate.
    """
    adjustments = local.momentum or local.weight_decay or local.prox_mu
    return local.optimizer == "sgd" and not adjustments and local.clip_norm is None


class Stack:
    """Weights W of the clients and their optimizer.

    Args:
        local: the settings of the optimizer, its rate, the proximal term, the clipping.
        places: the columns of the trained parameters in a row.
        count: the number of clients, k.
        device: the device of the weights.
        follower: changes gradients and follows steps; may be None.
    """

    def __init__(
        self, local: Local, places: Sequence[Place], count: int, device: str, follower: Follower | None = None
    ) -> None:
        self._local, self._places, self._follower = local, places, follower
        self.count, self.device = count, device
        self.blocks = {name: torch.empty(count, c.stop - c.start, device=device) for name, c, _ in places}
        """The weights (k, n) by name."""
        self._columns = {name: columns for name, columns, _ in places}
        self._factorable: dict[str, Factors] = {}
        self.factors: dict[str, Factors] = {}
        """Factors of layers whose weights are not in `blocks` now."""
        self._is_direct = is_plain(local) and follower is None
        self._targets_of_all = self.blocks if self._is_direct else self._zeros()
        self._scales = {"beta": 1.0, "alpha": -local.lr} if self._is_direct else {"beta": 0.0, "alpha": 1.0}
        moments = {"sgd": 1 if local.momentum else 0}.get(local.optimizer_name, 2)
        self._moments = [self._zeros() for _ in range(moments)]
        self._steps = 0
        self._seen: set[str] = set()

    def _zeros(self) -> Blocks:
        return {name: torch.zeros_like(block) for name, block in self.blocks.items()}

    def allow_factors(self, weight: str, shape: tuple[int, int]) -> None:
        """Permit factors for a layer's weights (out, in): its computation uses `factors` if there are any. CPU only."""
        if self._is_direct and self.device == "cpu":
            self._factorable[weight] = Factors(shape, self._local.lr, self.device)

    def begin(self, start: torch.Tensor, corrections: torch.Tensor | None, *, clients: int, length: int) -> None:
        """Reset the weights and the optimizer for a new group of clients.

        Args:
            start: (1, T) or (k', T), the starting weights; k' <= k.
            corrections: (k', T), c - c_i.
            clients: the number of clients, k'.
            length: the largest number of a client's examples over all steps.
        """
        self._start, self._corrections, self._steps = start, corrections, 0
        is_factored = len(start) == 1 and corrections is None
        self.factors = {n: f for n, f in self._factorable.items() if is_factored and pay(f.shape, length)}
        for name, factors in self.factors.items():
            factors.begin(start[0, self._columns[name]].view(factors.shape), clients, length)
        self._seen.clear()  # the remains of a failed step
        for moment in self._moments:
            for block in moment.values():
                block.zero_()
        for name, columns in self._columns.items():
            if name not in self.factors:
                self.blocks[name][:clients].copy_(start[:, columns])

    def take(self, clients: int) -> None:
        """Restrict the following steps to the first `clients` clients."""
        self.clients = clients
        self.weights = self._views(self.blocks)
        """The weights (clients, ...) by name."""
        self._targets = self._views(self._targets_of_all)

    def linear(self, weight: str, bias: str | None, delta: torch.Tensor, x: torch.Tensor) -> None:
        """Accept the gradient of a linear layer, as δ (clients, n, out) and x (clients, n, in)."""
        self._see(weight)
        if weight in self.factors:
            self.factors[weight].add(delta, x)
        else:
            self._targets[weight].baddbmm_(delta.transpose(1, 2), x, **self._scales)
        if bias is not None:
            self.put(bias, delta.sum(1))

    def put(self, name: str, gradient: torch.Tensor) -> None:
        """Accept the gradient (clients, ...) of any other parameter."""
        self._see(name)
        if not self._is_direct:
            self._targets[name].copy_(gradient)
            return
        self._targets[name].add_(gradient, alpha=-self._local.lr)

    def step(self) -> None:
        """Complete the step, once all gradients are present.

        Raises:
            CannotBatch: the loss does not depend on some parameter.
        """
        if missing := [name for name, _, _ in self._places if name not in self._seen]:
            raise CannotBatch(f"the loss does not depend on {', '.join(missing)}")
        self._seen.clear()
        self._steps += 1
        if not self._is_direct or self._corrections is not None:
            self._adjust_and_descend()

    def moved(self, name: str, out: Array) -> Array:
        """Write the change of the clients' weights to `out` (k', n); return the largest magnitude of each (k')."""
        if name not in self.factors:
            now, start = self.blocks[name][: len(out)], self._start[:, self._columns[name]]
            np.subtract(now.cpu().numpy(), start.cpu().numpy(), out=out)
            of_each: Array = np.maximum(out.max(axis=1, initial=0.0), -out.min(axis=1, initial=0.0))
            return of_each
        largest = np.empty(len(out), out.dtype)
        for number, moved in enumerate(self.factors[name].moved()):
            torch.from_numpy(out[number]).view(moved.shape).copy_(moved)
            largest[number] = torch.maximum(moved.amax(), -moved.amin()).item()  # while they are in the cache
        return largest

    def settle(self) -> None:
        """Compute the weights of all layers in `blocks` from their factors."""
        for name, factors in self.factors.items():
            start = self._start[0, self._columns[name]].view(factors.shape)
            for row, moved in zip(self.blocks[name], factors.moved(), strict=False):
                torch.add(start, moved, out=row.view(factors.shape))
        self.factors = {}

    def _adjust_and_descend(self) -> None:
        """Apply the parts of a step that products do not include: corrections, clipping, the optimizer."""
        local, m = self._local, self.clients
        starts = self._start if len(self._start) == 1 else self._start[:m]
        gradients = {name: block[:m] for name, block in self._targets_of_all.items()}
        for name, columns, _ in self._places:
            weights, gradient = self.blocks[name][:m], gradients[name]
            if local.prox_mu:
                gradient.add_(weights - starts[:, columns], alpha=local.prox_mu)
            if self._corrections is not None:
                gradient.add_(self._corrections[:m, columns], alpha=-local.lr if self._is_direct else 1.0)
        if self._is_direct:
            return
        if self._follower is not None:
            self._follower.change_gradients(self._views(self._targets_of_all))
        if local.clip_norm is not None:
            norms = sum(block.square().sum(1, keepdim=True) for block in gradients.values()) ** 0.5
            for gradient in gradients.values():
                gradient.mul_((local.clip_norm / (norms + 1e-6)).clamp(max=1.0))
        for name, _, shape in self._places:
            decay = local.weight_decay if local.decay_vectors or len(shape) > 1 else 0.0
            moments = [moment[name][:m] for moment in self._moments]
            self._descend(self.blocks[name][:m], gradients[name], moments, decay)
        if self._follower is not None:
            self._follower.stepped()

    def _descend(
        self, weights: torch.Tensor, gradients: torch.Tensor, moments: list[torch.Tensor], decay: float
    ) -> None:
        """Apply SGD, Adam or AdamW, as in torch.optim, to one client in each row."""
        local = self._local
        if local.optimizer == "adamw":
            weights.mul_(1 - local.lr * decay)
        elif decay:
            gradients.add_(weights, alpha=decay)
        if local.optimizer == "sgd":
            if moments:
                gradients = moments[0].mul_(local.momentum).add_(gradients)
            weights.add_(gradients, alpha=-local.lr)
            return
        first, second = moments
        first.lerp_(gradients, 1 - BETAS[0])
        second.mul_(BETAS[1]).addcmul_(gradients, gradients, value=1 - BETAS[1])
        corrected = (second.sqrt() / (1 - BETAS[1] ** self._steps) ** 0.5).add_(EPSILON)
        weights.addcdiv_(first, corrected, value=-local.lr / (1 - BETAS[0] ** self._steps))

    def _views(self, blocks: Blocks) -> dict[str, torch.Tensor]:
        return {name: blocks[name][: self.clients].view(self.clients, *shape) for name, _, shape in self._places}

    def _see(self, name: str) -> None:
        if name in self._seen:
            raise CannotBatch(f"{name} is used more than once in a step")
        self._seen.add(name)
