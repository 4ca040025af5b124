"""FedProx's Synthetic(α, β): softmax regression on 30 devices whose models (α) and data (β) differ.

    atoll simulate examples/synthetic.py:task --rounds 50 --set round.cohort_size=10

Device k draws B_k ~ N(0, β), u_k ~ N(0, α), W_k, b_k ~ N(u_k, 1) and v_k ~ N(B_k, 1); its examples are
x ~ N(v_k, diag(j^-1.2)) with the label argmax(W_k x + b_k). In `iid` all devices share one W and b, and v = 0.

Source:
    Li et al., "Federated Optimization in Heterogeneous Networks", MLSys 2020 (arXiv 1812.06127), section 5.1; as the
    authors' code has it, α and β are standard deviations, and sizes are lognormal(4, 2) + 50, here at most 1,000.
"""

from functools import cache

import numpy as np
import torch
from numpy.typing import NDArray
from torch import nn
from torch.utils.data import TensorDataset

from atoll import Local, Task

DEVICES, FEATURES, CLASSES = 30, 60, 10
SIZE_MAX = 1000
TEST_SHARE = 0.2
SEED = 0

Examples = tuple[NDArray[np.float32], NDArray[np.int64]]


@cache
def devices(alpha: float, beta: float, is_iid: bool) -> list[Examples]:
    """Return the inputs (n, 60) and labels (n,) of each device."""
    rng = np.random.default_rng(SEED)
    sizes = np.minimum(rng.lognormal(4, 2, DEVICES).astype(int) + 50, SIZE_MAX)
    scale = np.arange(1, FEATURES + 1) ** -0.6  # the root of the variances j^-1.2
    common = rng.normal(0, 1, (FEATURES, CLASSES)), rng.normal(0, 1, CLASSES)
    return [_device(rng, size, scale, (alpha, beta), common if is_iid else None) for size in sizes]


def _device(
    rng: np.random.Generator,
    size: int,
    scale: NDArray[np.float64],
    spread: tuple[float, float],
    common: tuple[NDArray[np.float64], NDArray[np.float64]] | None,
) -> Examples:
    mean, shift = rng.normal(0, spread[0]), rng.normal(0, spread[1])
    weights, bias = rng.normal(mean, 1, (FEATURES, CLASSES)), rng.normal(mean, 1, CLASSES)
    centre = rng.normal(shift, 1, FEATURES)
    if common is not None:
        (weights, bias), centre = common, np.zeros(FEATURES)
    inputs = centre + scale * rng.normal(0, 1, (size, FEATURES))
    return inputs.astype(np.float32), (inputs @ weights + bias).argmax(axis=1)


def _load(which: tuple[float, float, bool], device: int, split: str) -> TensorDataset | None:
    inputs, labels = devices(*which)[device]
    num_test = int(len(labels) * TEST_SHARE)
    part = {"train": slice(num_test, None), "test": slice(num_test)}.get(split)
    return None if part is None else TensorDataset(torch.from_numpy(inputs[part]), torch.from_numpy(labels[part]))


def _all_tests(which: tuple[float, float, bool]) -> TensorDataset:
    parts = [_load(which, device, "test") for device in range(DEVICES)]
    tensors = [part.tensors for part in parts if part is not None]
    return TensorDataset(torch.cat([inputs for inputs, _ in tensors]), torch.cat([labels for _, labels in tensors]))


def make_model() -> nn.Module:
    """Return a softmax regression of 610 parameters."""
    return nn.Linear(FEATURES, CLASSES)


def accuracy(outputs: torch.Tensor, targets: torch.Tensor) -> tuple[torch.Tensor, int]:
    """Return the numbers of correct outputs and of all."""
    return (outputs.argmax(dim=1) == targets).sum(), len(targets)


def _task(which: tuple[float, float, bool]) -> Task:
    return Task(
        model=make_model,
        data=lambda site, split: _load(which, int(site.removeprefix("device")), split),
        sites=[f"device{number:02}" for number in range(DEVICES)],
        loss=nn.functional.cross_entropy,
        metrics={"accuracy": accuracy},
        local=Local(epochs=20, batch_size=10, lr=0.01),
        test_data=lambda: _all_tests(which),
    )


task = _task((1.0, 1.0, False))
"""The task Synthetic(1, 1)."""
iid = _task((0.0, 0.0, True))
"""The task with one distribution for all devices."""
