"""One product of two matrices, by whichever library takes it fastest here."""

from typing import Any

import torch

SMALL = 2_000_000
"""Multiplications, up to which oneDNN's 20 microseconds for a call cost more than they save."""


def _wide_linear() -> Any:
    """oneDNN's x W^T for float32, where the processor has AVX-512; None elsewhere.

    MKL, which torch multiplies by, keeps to AVX2 on processors that are not Intel's: oneDNN is twice as fast there.
    """
    if torch.backends.cpu.get_cpu_capability() != "AVX512" or not torch.backends.mkldnn.is_available():  # type: ignore[no-untyped-call]
        return None
    return getattr(torch.ops.mkldnn, "_linear_pointwise", None)


_linear: Any = _wide_linear()


def times(a: torch.Tensor, b: torch.Tensor) -> torch.Tensor:
    """a (m, r) times b (r, n), in any strides; no gradients."""
    is_wide = _linear is not None and a.dtype == torch.float32 and a.device.type == "cpu"
    if is_wide and a.shape[0] * a.shape[1] * b.shape[1] > SMALL:
        product: torch.Tensor = _linear(a, b.t(), None, "none", [], "")
        return product
    return a @ b
