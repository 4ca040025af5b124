"""The replies of an exchange as records of Flower: each of them sound and like the others, or the reason for none.

A strategy of Flower's ends the run for one reply with another record or key than the first has, and averages a value
that is not finite into the model. Here such a reply is an error of its node.
"""

import io
import json
import math
from collections import Counter
from dataclasses import replace
from tokenize import TokenError
from typing import Any

import numpy as np
from flwr.app import Array, RecordDict

from atoll.aggregation.printable import count_of
from atoll.parallel.flower.records import from_content
from atoll.parallel.programs.grid import Reply
from atoll.parallel.task.content import Content

HEADERS = {(1, 0): np.lib.format.read_array_header_1_0, (2, 0): np.lib.format.read_array_header_2_0}


def records_of(replies: list[Reply]) -> list[RecordDict | str]:
    """Return the records of each reply, or the reason for none.

    Compared, for train and evaluate messages, are the names, kinds and keys of their records with those that most have,
    and the shape of each array with one that more than half of them have; ties go to the earlier message, so that equal
    sets give equal faults. A row of bytes, such as the trees of XGBoost, may have any length.

    Args:
        replies: they lose their arrays one after the other, so that a large one is in memory once.
    """
    found: list[RecordDict | str] = []
    for place, reply in enumerate(replies):
        found.append(reply.error if reply.content is None else _read(reply.content))
        replies[place] = replace(reply, content=reply.content and Content(reply.content.plain))
    for place, fault in _unlike(replies, found).items():
        found[place] = fault
    return found


def _read(content: Content) -> RecordDict | str:
    """Return the records of a content, or why it is no sound reply."""
    try:
        records = from_content(content)
        for name, record in records.items():
            for key, item in record.items():
                if not _is_finite(item):
                    return f"its reply has a value that is not finite: {name}.{key}"
    except (ValueError, TypeError, SyntaxError, TokenError, RecursionError) as error:
        return f"its reply cannot be read: {error}"
    return records


def _is_finite(item: Any) -> bool:
    if isinstance(item, Array):
        if not (item.data or item.dtype):
            return True  # the stand-in of a legacy client (`FitRes`) that has no parameters
        values = _values(item)
        return values.dtype.kind not in "fc" or bool(np.isfinite(values).all())
    return all(math.isfinite(one) for one in (item if isinstance(item, list) else [item]) if isinstance(one, float))


def _values(array: Array) -> "np.ndarray[Any, Any]":
    """Return the elements of an array, in one row, as a view of its bytes: `Array.numpy` copies them.

    Raises:
        ValueError: its bytes end early, or have another shape than it tells (Flower's first records tell none).
    """
    file = io.BytesIO(array.data)
    if array.stype != "numpy.ndarray" or (read := HEADERS.get(np.lib.format.read_magic(file))) is None:
        return array.numpy()
    shape, _, dtype = read(file)
    if dtype.hasobject:
        return array.numpy()  # raises
    size, left = math.prod(shape), len(array.data) - file.tell()
    if min(shape, default=0) < 0 or not dtype.itemsize or size * dtype.itemsize > left:
        raise ValueError(f"an array of {dtype} and shape {shape} in {count_of(left, 'byte')}")
    if array.dtype and tuple(array.shape) != shape:
        raise ValueError(f"an array of shape {shape} that tells shape {tuple(array.shape)}")
    return np.frombuffer(array.data, dtype, size, file.tell())


def _unlike(replies: list[Reply], found: list[RecordDict | str]) -> dict[int, str]:
    """Return the faults of replies that are not like most others, by their place."""
    compared = {
        place: reply.content.plain
        for place, reply in enumerate(replies)
        if reply.content is not None
        and not isinstance(found[place], str)
        and reply.kind.partition(".")[0] in ("train", "evaluate")
    }
    faults: dict[int, str] = {}
    if len(compared) < 2:
        return faults
    for part, what in ((_keys, "records or keys"), (_shapes, "shapes")):
        parts = {place: part(plain) for place, plain in compared.items()}
        usual, number = Counter(parts.values()).most_common(1)[0]
        if part is _shapes and 2 * number <= len(compared):
            continue
        for place, one in parts.items():
            if one != usual:
                faults.setdefault(place, f"its reply has other {what} than those of most nodes")
    return faults


def _keys(plain: Any) -> str:
    return json.dumps([[name, kind, sorted(row[0] for row in rows)] for name, kind, rows in plain])


def _shapes(plain: Any) -> str:
    arrays = {name: rows for name, kind, rows in plain if kind == "arrays"}
    return json.dumps({
        name: sorted([key, dtype, "any" if dtype == "uint8" and len(shape) == 1 else shape]
                     for key, dtype, shape, *_ in rows)
        for name, rows in arrays.items()
    })  # fmt: skip
