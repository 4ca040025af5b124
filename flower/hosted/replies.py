"""The replies of an exchange as records of Flower, unchanged, or the reason why their bytes are no records.

A custom loop of the app gets all of them; `fitting` judges the replies that Flower's aggregation gets.
"""

import io
import math
from dataclasses import replace
from tokenize import TokenError
from typing import Any

import numpy as np
from flwr.app import Array, RecordDict

from atoll.flower.records import from_content
from atoll.ground.printable import count_of
from atoll.task.content import Content
from atoll.task.programs.grid import Reply

HEADERS = {(1, 0): np.lib.format.read_array_header_1_0, (2, 0): np.lib.format.read_array_header_2_0}
NUMPY = "numpy.ndarray"
UNREADABLE = (ValueError, TypeError, SyntaxError, TokenError, RecursionError)
"""The errors of reading untrusted bytes."""


def records_of(replies: list[Reply]) -> list[RecordDict | str]:
    """Return the records of each reply, or the reason why it has none.

    Args:
        replies: their arrays are removed one after the other, so that a large array is in memory once.
    """
    found: list[RecordDict | str] = []
    for place, reply in enumerate(replies):
        found.append(reply.error if reply.content is None else _read(reply.content))
        replies[place] = replace(reply, content=reply.content and Content(reply.content.plain))
    return found


def _read(content: Content) -> RecordDict | str:
    """Return the records of a content, or the reason why it has none; only numpy arrays are read."""
    try:
        records = from_content(content)
        for record in records.array_records.values():
            for array in record.values():
                if array.stype == NUMPY and (array.data or array.dtype):  # none: a `FitRes` without parameters
                    values_of(array)
    except UNREADABLE as error:
        return f"its reply cannot be read: {error}"
    return records


def values_of(array: Array) -> "np.ndarray[Any, Any]":
    """Return the elements of an array in its shape, as a view of its bytes: `Array.numpy` copies them.

    Raises:
        ValueError: its bytes end early, or have another shape than stated (Flower's first records state none).
        TypeError: it is no numpy array.
    """
    file = io.BytesIO(array.data)
    if array.stype != NUMPY or (read := HEADERS.get(np.lib.format.read_magic(file))) is None:
        return array.numpy()
    shape, is_fortran, dtype = read(file)
    if dtype.hasobject:
        return array.numpy()  # raises
    size, left = math.prod(shape), len(array.data) - file.tell()
    if min(shape, default=0) < 0 or size * dtype.itemsize > left:
        raise ValueError(f"an array of {dtype} and shape {shape} in {count_of(left, 'byte')}")
    if array.dtype and tuple(array.shape) != shape:
        raise ValueError(f"an array of shape {shape} that states shape {tuple(array.shape)}")
    values = np.ndarray(size, dtype, array.data, file.tell())
    return values.reshape(shape, order="F" if is_fortran else "C")
