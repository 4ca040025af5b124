"""The change of a linear layer of many clients as two factors, so that its weights are read once for all of them.

Clients that begin with the same W and take plain steps have, after inputs x_1 ... x_r of the layer and gradients
δ_1 ... δ_r of its output,

    W_i = W + Δ_i^T X_i        X_i (r, in): the x        Δ_i (r, out): the -η δ

    forward    x W_i^T = x W^T + (x X_i^T) Δ_i
    backward   δ W_i   = δ W   + (δ Δ_i^T) X_i
    update     W_i - W = Δ_i^T X_i

An update of 200,000 numbers is then written once instead of in each step, and most multiplications are in one product
for all clients. Each example costs r (in + out) multiplications in addition to in * out: few while r is small.
"""

from collections.abc import Iterator
from typing import Any

import torch

SMALL = 1 << 14
"""Minimum number of weights of a layer; smaller layers are updated faster without factors."""

ONEDNN_FROM = 2_000_000
"""Number of multiplications beyond which oneDNN saves more than its 20 microseconds per call."""


def pay(shape: tuple[int, ...], length: int) -> bool:
    """Return whether factors are faster than weights of this shape, for `length` examples of a client in all steps."""
    if len(shape) != 2 or shape[0] * shape[1] < SMALL:
        return False
    return length * (shape[0] + shape[1]) <= shape[0] * shape[1]


class Factors:
    """The factors of one layer, for up to k clients.

    Args:
        shape: the shape of its weights (out, in).
        lr: the learning rate η.
        device: the device that computes.
    """

    def __init__(self, shape: tuple[int, int], lr: float, device: str) -> None:
        self.shape, self._lr, self._device = shape, lr, device
        self._x = self._delta = torch.empty(0, 0, 0, device=device)

    def begin(self, start: torch.Tensor, clients: int, length: int) -> None:
        """Reset the factors for a new group of clients.

        Args:
            start: (out, in), the W of all clients.
            clients: the number of clients.
            length: the largest number of a client's examples over all steps.
        """
        self._start, self._filled = start, 0
        if self._x.shape[:2] != (clients, length):
            out, into = self.shape
            self._x = torch.empty(clients, length, into, device=self._device, dtype=start.dtype)
            self._delta = torch.empty(clients, length, out, device=self._device, dtype=start.dtype)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Compute x W_i^T (m, n, out) from x (m, n, in)."""
        product = times(x.reshape(-1, x.shape[2]), self._start.t()).view(*x.shape[:2], -1)
        if self._filled:
            xs, deltas = self._before(len(x))
            product.baddbmm_(torch.bmm(x, xs.transpose(1, 2)), deltas)
        return product

    def backward(self, delta: torch.Tensor) -> torch.Tensor:
        """Compute δ W_i (m, n, in) from δ (m, n, out)."""
        product = times(delta.reshape(-1, delta.shape[2]), self._start).view(*delta.shape[:2], -1)
        if self._filled:
            xs, deltas = self._before(len(delta))
            product.baddbmm_(torch.bmm(delta, deltas.transpose(1, 2)), xs)
        return product

    def add(self, delta: torch.Tensor, x: torch.Tensor) -> None:
        """Add one step of the first m clients; the weights of the others do not change."""
        m, rows = len(x), slice(self._filled, self._filled + x.shape[1])
        torch.mul(delta, -self._lr, out=self._delta[:m, rows])
        self._x[:m, rows] = x
        for factor in (self._delta, self._x):  # clears old contents, because NaN times 0 is NaN
            factor[m:, rows] = 0
        self._filled = rows.stop

    def moved(self) -> Iterator[torch.Tensor]:
        """Yield W_i - W (out, in) of each client."""
        for delta, x in zip(self._delta, self._x, strict=True):
            yield times(delta[: self._filled].t(), x[: self._filled])

    def _before(self, clients: int) -> tuple[torch.Tensor, torch.Tensor]:
        return self._x[:clients, : self._filled], self._delta[:clients, : self._filled]


def _wide_linear() -> Any:
    """Return oneDNN's x W^T for float32 if the processor has AVX-512; else None.

    MKL, torch's default, uses only AVX2 on processors of other makers than Intel; there oneDNN is twice as fast.
    """
    if torch.backends.cpu.get_cpu_capability() != "AVX512" or not torch.backends.mkldnn.is_available():  # type: ignore[no-untyped-call]
        return None
    return getattr(torch.ops.mkldnn, "_linear_pointwise", None)


_linear: Any = _wide_linear()


def times(a: torch.Tensor, b: torch.Tensor) -> torch.Tensor:
    """Multiply a (m, r) by b (r, n), with any strides and without gradients."""
    is_wide = _linear is not None and a.dtype == torch.float32 and a.device.type == "cpu"
    if is_wide and a.shape[0] * a.shape[1] * b.shape[1] > ONEDNN_FROM:
        product: torch.Tensor = _linear(a, b.t(), None, "none", [], "")
        return product
    return a @ b
