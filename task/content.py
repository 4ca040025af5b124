"""The content of a message between a server program and a site: plain values and named arrays, as tensors of bytes.

A model has one layout and few dtypes; a message may have any. So each array is sent as one tensor of U8, its bytes: an
array that a site has from an earlier message is not sent again.

    "000000"        {"arrays": [[name, dtype, shape], ...], "plain": ...}, JSON
    "000001", ...   the bytes of each array, in the order of the list
"""

import json
import math
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from atoll.ground.printable import count_of
from atoll.task.arrays import Arrays
from atoll.task.errors import TaskBroken

HEADER = "000000"


@dataclass(frozen=True, slots=True)
class Content:
    """The content of a message or of a reply."""

    plain: Any = None
    """A JSON value: numbers, strings, lists, objects."""
    arrays: Mapping[str, "np.ndarray[Any, Any]"] = field(default_factory=dict)
    """Arrays by name, of any shape and of any dtype whose elements are numbers or bytes."""


def to_tensors(content: Content) -> Arrays:
    """Return a content as tensors of bytes, which are views of its arrays where these are contiguous.

    Raises:
        TaskBroken: the plain value is no JSON value, or an array has objects.
    """
    listed = []
    tensors: Arrays = {}
    for number, (name, array) in enumerate(content.arrays.items(), start=1):
        if array.dtype.hasobject:
            raise TaskBroken(f"{name} is of dtype {array.dtype}; allowed in a message: numbers, bools and bytes")
        listed.append([name, array.dtype.str, list(array.shape)])
        tensors[tensor_name(number)] = np.ascontiguousarray(array).reshape(-1).view(np.uint8)
    try:
        odd = [repr(key) for key in _odd_keys(content.plain)]
        header = b"" if odd else _header(listed, content.plain)
    except (TypeError, ValueError, RecursionError) as error:
        raise TaskBroken(f"the plain part of a message must be a JSON value: {error}") from error
    if odd:
        raise TaskBroken(f"the plain part of a message has the key {odd[0]}; allowed in JSON: strings as keys")
    return {HEADER: np.frombuffer(header, np.uint8), **tensors}


def tensor_name(number: int) -> str:
    """Return the name of the tensor of an array; the first array has number 1."""
    return f"{number:06d}"


def is_encodable(text: str) -> bool:
    """Return whether UTF-8 can encode a string: it has no lone surrogate."""
    try:
        text.encode()
    except UnicodeEncodeError:
        return False
    return True


def _header(listed: list[Any], plain: Any) -> bytes:
    """Return the header, in ASCII with escapes.

    Raises:
        ValueError: a string has a lone surrogate, which UTF-8 cannot encode.
    """
    header = json.dumps({"arrays": listed, "plain": plain}, sort_keys=True)
    if "\\ud" in header and not is_encodable(json.dumps([listed, plain], ensure_ascii=False)):
        raise ValueError("a string has a lone surrogate")
    return header.encode()


def _odd_keys(value: Any) -> Iterator[Any]:
    """Yield the keys of objects that are no strings, and which JSON would turn into strings."""
    if isinstance(value, dict):
        yield from (key for key in value if not isinstance(key, str))
        value = list(value.values())
    if isinstance(value, list | tuple):
        for item in value:
            yield from _odd_keys(item)


def from_tensors(tensors: Mapping[str, "np.ndarray[Any, Any]"]) -> Content:
    """Return the content that tensors encode; its arrays are views of them.

    Raises:
        ValueError: the tensors do not have this form.
    """
    try:
        header = json.loads(tensors[HEADER].tobytes())
        names = [tensor_name(number) for number in range(1, len(header["arrays"]) + 1)]
        if sorted(tensors) != [HEADER, *names]:
            raise ValueError(f"{count_of(len(tensors), 'tensor')} for {count_of(len(names), 'array')}")
        arrays = {
            name: _array(tensors[tensor], dtype, shape)
            for tensor, (name, dtype, shape) in zip(names, header["arrays"], strict=True)
        }
        if len(arrays) != len(names) or not all(isinstance(name, str) for name in arrays):
            raise ValueError(f"the names of its arrays are {[row[0] for row in header['arrays']]}")
        return Content(header["plain"], arrays)
    except (KeyError, TypeError, ValueError, OverflowError, SyntaxError, RecursionError) as error:
        raise ValueError(f"this is not the content of a message: {error}") from error


def _array(values: "np.ndarray[Any, Any]", dtype: str, shape: list[int]) -> "np.ndarray[Any, Any]":
    kind = np.dtype(dtype)
    is_sound = values.dtype == np.uint8 and kind.itemsize and not kind.hasobject and all(size >= 0 for size in shape)
    if not is_sound or math.prod(shape) * kind.itemsize != values.size:
        raise ValueError(
            f"an array of {dtype} and shape {shape} in {count_of(values.size, 'element')} of {values.dtype}"
        )
    return np.ascontiguousarray(values).view(kind).reshape(shape) if values.size else np.zeros(shape, kind)
