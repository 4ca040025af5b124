"""The tensors of a model and of its updates as the arrays that Flower's strategies average.

A strategy of Flower averages whole models, x + u of each client, and returns floats for integers.
"""

from typing import Any

import numpy as np
from flwr.app import ArrayRecord

from atoll.task.arrays import Arrays, check_like, layout_of
from atoll.tensors.layout import Layout
from atoll.tensors.safetensors_file import NUMPY_DTYPES


def in_layout(record: ArrayRecord, layout: Layout) -> Arrays:
    """Return the arrays of a record in the dtypes of a model; integers are rounded to the nearest, half to even.

    Raises:
        TaskMismatch: names or shapes differ from the model's; the message lists every difference.
    """
    found = {name: array.numpy() for name, array in record.items()}
    dtypes = {tensor.name: NUMPY_DTYPES[tensor.dtype] for tensor in layout}
    arrays = {name: _cast(array, dtypes.get(name, array.dtype)) for name, array in found.items()}
    check_like(arrays, layout)
    return arrays


def moved(version: Arrays, update: Arrays) -> Arrays:
    """Return the client's model, version + update.

    Raises:
        TaskMismatch: the update's tensors differ from the version's.
    """
    check_like(update, layout_of(version))
    return {name: np.asarray(array + update[name], array.dtype) for name, array in version.items()}


def _cast(array: "np.ndarray[Any, Any]", dtype: "np.dtype[Any]") -> "np.ndarray[Any, Any]":
    whole = dtype.kind in "iu" and array.dtype.kind == "f"
    return np.asarray(np.rint(array) if whole else array, dtype=dtype)
