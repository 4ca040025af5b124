"""Named numpy arrays as they leave a training: their layout, and what is checked of them. Without torch."""

from collections.abc import Mapping
from typing import Any

import numpy as np

from atoll.aggregation.tensors.layout import Layout, Tensor, in_order
from atoll.parallel.task.errors import NotFinite, TaskBroken, TaskMismatch

Arrays = dict[str, np.ndarray[Any, Any]]

ALLOWED = {
    np.dtype(np.float32): "F32",
    np.dtype(np.int64): "I64",
    np.dtype(np.int32): "I32",
    np.dtype(np.int16): "I16",
    np.dtype(np.int8): "I8",
    np.dtype(np.uint8): "U8",
}
"""The dtypes that parameters and updates have outside of a model, with their safetensors names."""


def layout_of(arrays: Mapping[str, np.ndarray[Any, Any]]) -> Layout:
    """Names, dtypes and shapes in canonical order.

    Raises:
        TaskBroken: an array has a dtype that may not travel; all of them are listed.
    """
    allowed = ", ".join(str(dtype) for dtype in ALLOWED)
    faults = [
        f"{name} is {array.dtype} (allowed: {allowed}; use .astype(np.float32))"
        for name, array in arrays.items()
        if array.dtype not in ALLOWED
    ]
    if faults:
        raise TaskBroken("; ".join(faults))
    return in_order(Tensor(name, ALLOWED[array.dtype], array.shape) for name, array in arrays.items())


def check_like(arrays: Mapping[str, np.ndarray[Any, Any]], expected: Layout, *, may_omit: bool = False) -> None:
    """Insist on the expected names, shapes and dtypes; `may_omit`: on some of them at least.

    Raises:
        TaskMismatch: with every difference.
    """
    given = {name: Tensor(name, ALLOWED.get(a.dtype, str(a.dtype)), a.shape) for name, a in arrays.items()}
    wanted = {tensor.name: tensor for tensor in expected}
    is_whole = not may_omit or not given
    faults = [f"{name} is missing" for name in wanted if name not in given and is_whole]
    faults += [f"{name} is unknown" for name in given if name not in wanted]
    faults += [
        f"{name} is {given[name].dtype} {given[name].shape}, expected {tensor.dtype} {tensor.shape}"
        for name, tensor in wanted.items()
        if name in given and given[name] != tensor
    ]
    if faults:
        raise TaskMismatch("; ".join(faults))


def check_finite(arrays: Mapping[str, np.ndarray[Any, Any]], what: str) -> None:
    """Insist on finite numbers.

    Raises:
        NotFinite: naming the tensors.
    """
    names = [name for name, array in arrays.items() if not np.isfinite(array).all()]
    if names:
        raise NotFinite(f"the {what} has NaN or infinite values in {', '.join(names)}")
