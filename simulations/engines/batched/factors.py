"""What a linear layer of many clients has moved, as two factors: so its weights are read once for all of them.

Clients that begin with the same W and take plain steps have, after the examples x_1 ... x_r that went into the layer
and the gradients δ_1 ... δ_r behind it,

    W_i = W + Δ_i^T X_i        X_i (r, in): the x        Δ_i (r, out): the -η δ

    forward    x W_i^T = x W^T + (x X_i^T) Δ_i
    backward   δ W_i   = δ W   + (δ Δ_i^T) X_i
    update     W_i - W = Δ_i^T X_i

An update of 200,000 numbers is then written once, and not moved in each step, and most of what is multiplied is one
product for all clients. Each example costs r (in + out) multiplications beside in * out: few, while r is small.
"""

from collections.abc import Iterator

import torch

from atoll.simulations.engines.batched.products import times

SMALL = 1 << 14
"""Numbers of a layer: fewer are moved in less time than what factors need beside products."""


def pay(shape: tuple[int, ...], length: int) -> bool:
    """Whether factors are sooner than weights of this shape, for clients of so many examples over all steps."""
    if len(shape) != 2 or shape[0] * shape[1] < SMALL:
        return False
    return length * (shape[0] + shape[1]) <= shape[0] * shape[1]


class Factors:
    """Of one layer, for up to k clients.

    Args:
        shape: (out, in)
        lr: η
        device: where it computes.
    """

    def __init__(self, shape: tuple[int, int], lr: float, device: str) -> None:
        self.shape, self._lr, self._device = shape, lr, device
        self._x = self._delta = torch.empty(0, 0, 0, device=device)

    def begin(self, start: torch.Tensor, clients: int, length: int) -> None:
        """New clients.

        Args:
            start: (out, in), W of all.
            clients: how many.
            length: examples of the longest, over all steps.
        """
        self._start, self._filled = start, 0
        if self._x.shape[:2] != (clients, length):
            out, into = self.shape
            self._x = torch.empty(clients, length, into, device=self._device, dtype=start.dtype)
            self._delta = torch.empty(clients, length, out, device=self._device, dtype=start.dtype)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """x W_i^T (m, n, out), of x (m, n, in)."""
        product = times(x.reshape(-1, x.shape[2]), self._start.t()).view(*x.shape[:2], -1)
        if self._filled:
            xs, deltas = self._before(len(x))
            product.baddbmm_(torch.bmm(x, xs.transpose(1, 2)), deltas)
        return product

    def backward(self, delta: torch.Tensor) -> torch.Tensor:
        """δ W_i (m, n, in), of δ (m, n, out)."""
        product = times(delta.reshape(-1, delta.shape[2]), self._start).view(*delta.shape[:2], -1)
        if self._filled:
            xs, deltas = self._before(len(delta))
            product.baddbmm_(torch.bmm(delta, deltas.transpose(1, 2)), xs)
        return product

    def add(self, delta: torch.Tensor, x: torch.Tensor) -> None:
        """One step of the first m clients; the others stay where they are."""
        m, rows = len(x), slice(self._filled, self._filled + x.shape[1])
        torch.mul(delta, -self._lr, out=self._delta[:m, rows])
        self._x[:m, rows] = x
        for factor in (self._delta, self._x):  # of what lay there before, NaN times 0 would be NaN
            factor[m:, rows] = 0
        self._filled = rows.stop

    def moved(self) -> Iterator[torch.Tensor]:
        """W_i - W (out, in) of one client after the other."""
        for delta, x in zip(self._delta, self._x, strict=True):
            yield times(delta[: self._filled].t(), x[: self._filled])

    def _before(self, clients: int) -> tuple[torch.Tensor, torch.Tensor]:
        return self._x[:clients, : self._filled], self._delta[:clients, : self._filled]
