"""Checks of named numpy arrays that leave a training: layout, agreement with the model, finiteness. No torch."""

from collections.abc import Iterable, Mapping
from dataclasses import replace
from typing import Any

import numpy as np

from atoll.task.errors import NotFinite, TaskBroken, TaskMismatch
from atoll.tensors.layout import Layout, Tensor, in_order

Arrays = dict[str, np.ndarray[Any, Any]]

ALLOWED = {
    np.dtype(np.float32): "F32",
    np.dtype(np.int64): "I64",
    np.dtype(np.int32): "I32",
    np.dtype(np.int16): "I16",
    np.dtype(np.int8): "I8",
    np.dtype(np.uint8): "U8",
}
"""The dtypes of parameters and updates outside of a model, with their safetensors names."""


def layout_of(arrays: Mapping[str, np.ndarray[Any, Any]]) -> Layout:
    """Return names, dtypes and shapes of the arrays, in canonical order.

    Raises:
        TaskBroken: arrays have a dtype that is not in `ALLOWED`; the message lists all of them.
    """
    allowed = ", ".join(str(dtype) for dtype in ALLOWED)
    faults = [
        f"{name} is {array.dtype} (allowed: {allowed}; use .astype(np.float32))"
        for name, array in arrays.items()
        if array.dtype not in ALLOWED
    ]
    if faults:
        raise TaskBroken(*faults)
    return in_order(Tensor(name, ALLOWED[array.dtype], array.shape) for name, array in arrays.items())


def check_like(arrays: Mapping[str, np.ndarray[Any, Any]], expected: Layout, *, may_omit: bool = False) -> None:
    """Check that the arrays have the expected names, shapes and dtypes.

    Args:
        arrays: the arrays, by name.
        expected: the model's layout.
        may_omit: allow that some, but not all, of the expected arrays are missing.

    Raises:
        TaskMismatch: they differ; the message lists every difference.
    """
    given = [Tensor(name, ALLOWED.get(a.dtype, str(a.dtype)), a.shape) for name, a in arrays.items()]
    check_form(given, expected, may_omit=may_omit)


def check_form(tensors: Iterable[Tensor], expected: Layout, *, may_omit: bool = False) -> None:
    """Check that tensors have the expected names, shapes and dtypes; see `check_like`."""
    given = {tensor.name: tensor for tensor in tensors}
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
        raise TaskMismatch(*faults)


def check_rows_like(arrays: Mapping[str, np.ndarray[Any, Any]], expected: Layout) -> None:
    """Check that arrays can be appended to a model's: equal names, dtypes and shapes, except for the number of rows.

    Args:
        arrays: the arrays, by name.
        expected: the model's layout; a tensor has at least one axis.

    Raises:
        TaskMismatch: they differ; the message lists every difference.
    """
    rows = {name: len(array) if array.ndim else 0 for name, array in arrays.items()}
    check_like(arrays, tuple(replace(t, shape=(rows.get(t.name, 0), *t.shape[1:])) for t in expected))


def check_grows(layout: Layout) -> None:
    """Check that the tensors of a model can grow.

    Raises:
        TaskBroken: there are no tensors, or some have no axis; the message lists them.
    """
    if scalars := [tensor.name for tensor in layout if not tensor.shape]:
        raise TaskBroken(
            f"{', '.join(scalars)} has no axis along which rule concatenate could append rows: give it one, as "
            "np.zeros(0, np.float32) has"
        )
    if not layout:
        raise TaskBroken("the initial model has no arrays to which rule concatenate could append rows")


def check_finite(arrays: Mapping[str, np.ndarray[Any, Any]], what: str) -> None:
    """Check that all numbers are finite.

    Raises:
        NotFinite: the message names the tensors that hold NaN or infinity.
    """
    names = [name for name, array in arrays.items() if not np.isfinite(array).all()]
    if names:
        raise NotFinite(f"the {what} has NaN or infinite values in {', '.join(names)}")
