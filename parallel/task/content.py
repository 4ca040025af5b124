"""The content of a message between a server program and a site: plain values and named arrays, as tensors of bytes.

A model has one layout and few dtypes; a message has any. So each array travels as its bytes, one tensor of U8 for each:
an array that a site has from an earlier message is not sent again.

    "000000"        {"arrays": [[name, dtype, shape], ...], "plain": ...}, JSON
    "000001", ...   the bytes of each array, in the order of the list
"""

import json
from collections.abc import Mapping
from dataclasses import dataclass, field
from itertools import chain
from typing import Any

import numpy as np

from atoll.parallel.task.arrays import Arrays
from atoll.parallel.task.errors import TaskBroken

HEADER = "000000"


@dataclass(frozen=True, slots=True)
class Content:
    """The content of a message or of a reply."""

    plain: Any = None
    """A value that JSON has: numbers, texts, lists, objects."""
    arrays: Mapping[str, "np.ndarray[Any, Any]"] = field(default_factory=dict)
    """Arrays by name, of any shape and of any dtype whose elements are numbers or bytes."""


def to_tensors(content: Content) -> Arrays:
    """Return a content as tensors of bytes, which are views of its arrays where these are contiguous.

    Raises:
        TaskBroken: the plain value is none that JSON has, or an array has objects.
    """
    listed = []
    tensors: Arrays = {}
    for number, (name, array) in enumerate(content.arrays.items(), start=1):
        if array.dtype.hasobject:
            raise TaskBroken(f"{name} is of dtype {array.dtype}; allowed in a message: numbers, bools and bytes")
        listed.append([name, array.dtype.str, list(array.shape)])
        tensors[f"{number:06d}"] = np.ascontiguousarray(array).reshape(-1).view(np.uint8)
    if (key := _odd_key(content.plain)) is not None:
        raise TaskBroken(f"the plain part of a message has the key {key!r}; allowed in JSON: texts as keys")
    try:
        header = json.dumps({"arrays": listed, "plain": content.plain}, sort_keys=True).encode()
    except (TypeError, ValueError, RecursionError) as error:
        raise TaskBroken(f"the plain part of a message must be a value that JSON has: {error}") from error
    return {HEADER: np.frombuffer(header, np.uint8), **tensors}


def _odd_key(value: Any) -> Any:
    """Return a key of an object that is no text, and would come back as one; None: there is none."""
    if isinstance(value, dict):
        here = (key for key in value if not isinstance(key, str))
        return next(chain(here, filter(lambda key: key is not None, map(_odd_key, value.values()))), None)
    if isinstance(value, list | tuple):
        return next((key for key in map(_odd_key, value) if key is not None), None)
    return None


def from_tensors(tensors: Mapping[str, "np.ndarray[Any, Any]"]) -> Content:
    """Return the content of tensors, whose arrays are views of them.

    Raises:
        ValueError: the tensors are not of this form.
    """
    try:
        header = json.loads(tensors[HEADER].tobytes())
        names = [f"{number:06d}" for number in range(1, len(header["arrays"]) + 1)]
        if sorted(tensors) != [HEADER, *names]:
            raise ValueError(f"{len(tensors)} tensors for {len(names)} arrays")
        arrays = {
            name: _array(tensors[tensor], dtype, shape)
            for tensor, (name, dtype, shape) in zip(names, header["arrays"], strict=True)
        }
        return Content(header["plain"], arrays)
    except (KeyError, TypeError, ValueError, RecursionError) as error:
        raise ValueError(f"this is no content of a message: {error}") from error


def _array(values: "np.ndarray[Any, Any]", dtype: str, shape: list[int]) -> "np.ndarray[Any, Any]":
    kind = np.dtype(dtype)
    if kind.hasobject or values.dtype != np.uint8 or any(size < 0 for size in shape):
        raise ValueError(f"an array of {dtype} and shape {shape} in {values.dtype}")
    return np.ascontiguousarray(values).view(kind).reshape(shape) if values.size else np.zeros(shape, kind)
