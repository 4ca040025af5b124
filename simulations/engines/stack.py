"""The weights of many clients side by side, and the local optimizer that moves all of them at once.

    W   (k, T) float32    row i: all trained parameters of client i
    G   (k, T) float32    their gradients; without momentum and clipping there is no G, as products add to W at once:

        W_i <- (1 - η (λ + μ)) W_i - η δ_i^T x_i,    then  W_i <- W_i + η μ W_i(0) - η (c - c_i)

Legend: η rate, λ weight decay, μ FedProx, δ_i the gradient behind a linear layer and x_i what went into it, c - c_i
SCAFFOLD's correction. A gradient of 200,000 numbers is then never written: that is half of such a step's time.

Clients are sorted by their number of steps: those that still train are always the first ones.
"""

from collections.abc import Mapping, Sequence

import torch

from atoll.parallel.local import Local

BETAS = (0.9, 0.999)
EPSILON = 1e-8
"""Of Adam, as torch.optim has them."""

Place = tuple[str, slice, tuple[int, ...]]
"""A parameter's name, its columns and its shape."""


class CannotBatch(Exception):
    """Why clients cannot be trained in one product; a sentence for a person."""


class Stack:
    """W with its optimizer.

    Args:
        local: with the optimizer, its rate, the proximal term, the clipping.
        places: of the trained parameters in a row.
        count: k.
        device: where it lies.
    """

    def __init__(self, local: Local, places: Sequence[Place], count: int, device: str) -> None:
        self._local, self._places = local, places
        self.width = max(columns.stop for _, columns, _ in places)
        self.matrix = torch.empty(count, self.width, device=device)
        self._is_direct = local.optimizer == "sgd" and not local.momentum and local.clip_norm is None
        self._target = self.matrix if self._is_direct else torch.zeros_like(self.matrix)
        keep = 1 - local.lr * (local.weight_decay + local.prox_mu)
        self._scales = {"beta": keep, "alpha": -local.lr} if self._is_direct else {"beta": 0.0, "alpha": 1.0}
        moments = {"sgd": 1 if local.momentum else 0}.get(local.optimizer, 2)
        self._moments = [torch.zeros_like(self.matrix) for _ in range(moments)]
        self._steps = 0
        self._seen: set[str] = set()

    def begin(self, start: torch.Tensor, corrections: torch.Tensor | None) -> None:
        """New clients.

        Args:
            start: (1, T) or (k', T), where they begin; k' <= k.
            corrections: (k', T), c - c_i.
        """
        self._start, self._corrections, self._steps = start, corrections, 0
        for moment in self._moments:
            moment.zero_()
        self.matrix.copy_(
            start if len(start) == 1 else torch.nn.functional.pad(start, (0, 0, 0, len(self.matrix) - len(start)))
        )

    def take(self, clients: int) -> None:
        """So many of them train from now on."""
        self.clients = clients
        self.weights = self._views(self.matrix)
        """(clients, ...) by name."""
        self._targets = self._views(self._target)

    def linear(self, weight: str, bias: str | None, delta: torch.Tensor, x: torch.Tensor) -> None:
        """Take the gradient of a linear layer, from δ (clients, n, out) and x (clients, n, in)."""
        self._see(weight)
        self._targets[weight].baddbmm_(delta.transpose(1, 2), x, **self._scales)
        if bias is not None:
            self.put(bias, delta.sum(1))

    def put(self, name: str, gradient: torch.Tensor) -> None:
        """Take the gradient (clients, ...) of any other parameter."""
        self._see(name)
        target, (beta, alpha) = self._targets[name], self._scales.values()
        if beta == 0:
            target.copy_(gradient)
        else:
            target.mul_(beta) if beta != 1 else None
            target.add_(gradient, alpha=alpha)

    def step(self) -> None:
        """All gradients are there.

        Raises:
            CannotBatch: the loss does not depend on some parameter.
        """
        if missing := [name for name, _, _ in self._places if name not in self._seen]:
            raise CannotBatch(f"the loss does not depend on {', '.join(missing)}")
        self._seen.clear()
        self._steps += 1
        local, m = self._local, self.clients
        start = self._start if len(self._start) == 1 else self._start[:m]
        corrections = None if self._corrections is None else self._corrections[:m]
        if self._is_direct:
            if local.prox_mu:
                self.matrix[:m].add_(start, alpha=local.lr * local.prox_mu)
            if corrections is not None:
                self.matrix[:m].add_(corrections, alpha=-local.lr)
            return
        gradients = self._target[:m]
        if local.prox_mu:
            gradients.add_(self.matrix[:m] - start, alpha=local.prox_mu)
        if corrections is not None:
            gradients.add_(corrections)
        if local.clip_norm is not None:
            norms = torch.linalg.vector_norm(gradients, dim=1, keepdim=True)
            gradients.mul_((local.clip_norm / (norms + 1e-6)).clamp(max=1.0))
        self._descend(self.matrix[:m], gradients, [moment[:m] for moment in self._moments])

    def _descend(self, weights: torch.Tensor, gradients: torch.Tensor, moments: list[torch.Tensor]) -> None:
        """As torch.optim's SGD, Adam and AdamW, of one client in each row."""
        local = self._local
        if local.optimizer == "adamw":
            weights.mul_(1 - local.lr * local.weight_decay)
        elif local.weight_decay:
            gradients.add_(weights, alpha=local.weight_decay)
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

    def _views(self, matrix: torch.Tensor) -> Mapping[str, torch.Tensor]:
        return {
            name: matrix[: self.clients, columns].view(self.clients, *shape) for name, columns, shape in self._places
        }

    def _see(self, name: str) -> None:
        if name in self._seen:
            raise CannotBatch(f"{name} is used more than once in a step")
        self._seen.add(name)
