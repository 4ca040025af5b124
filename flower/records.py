"""Flower's records as the content of a message, and as the named arrays of a model.

A content has the names, kinds and values of all records as plain, and each array and byte string as bytes. The bytes
are Flower's (`Array.data`), of any dtype and `stype`, so that equal records are restored.
"""

from collections.abc import Callable, Iterator, Mapping
from typing import Any

import numpy as np
from flwr.app import Array, ArrayRecord, ConfigRecord, MetricRecord, RecordDict

from atoll.ground.printable import count_of
from atoll.task.arrays import ALLOWED, Arrays
from atoll.task.content import Content
from atoll.task.errors import TaskBroken

CAST = {np.dtype(np.float64): np.dtype(np.float32), np.dtype(np.float16): np.dtype(np.float32)}
"""The dtypes that are sent as another dtype; the app gets its dtype back."""

NAME_MAX, DIMS_MAX = 1024, 8
"""Largest length of an array's name, and largest number of its dimensions, on the wire (`protocol/manifest`)."""

AVERAGED = ALLOWED.keys() - {np.dtype(name) for name in ("int8", "int16", "uint8")}
"""The other dtypes of arrays that are averaged: narrower integers may overflow in a difference of two values."""


def to_content(records: RecordDict) -> Content:
    """Return records as the content of a message: names, kinds and values as plain, the bytes of arrays as arrays."""
    plain: list[list[Any]] = []
    arrays: dict[str, np.ndarray[Any, Any]] = {}

    def blob(data: bytes) -> str:
        name = str(len(arrays))
        arrays[name] = np.frombuffer(data, np.uint8)
        return name

    for name, record in records.items():
        if isinstance(record, ArrayRecord):
            rows = [[key, a.dtype, list(a.shape), a.stype, blob(a.data)] for key, a in record.items()]
            plain.append([name, "arrays", rows])
        else:
            kind = "metrics" if isinstance(record, MetricRecord) else "config"
            plain.append([name, kind, [[key, _plain(value, blob)] for key, value in record.items()]])
    return Content(plain, arrays)


def _plain(value: Any, blob: Callable[[bytes], str]) -> Any:
    if isinstance(value, bytes):
        return {"bytes": blob(value)}
    if isinstance(value, list) and any(isinstance(item, bytes) for item in value):
        return {"list": [_plain(item, blob) for item in value]}
    return value


def from_content(content: Content) -> RecordDict:
    """Return the records of `to_content`, which share no memory with it.

    Raises:
        ValueError: the content does not have this form.
    """
    try:
        _refuse_twice(content.plain)
        return RecordDict({name: _record(kind, rows, content.arrays) for name, kind, rows in content.plain})
    except (TypeError, KeyError, ValueError, IndexError, RecursionError) as error:
        raise ValueError(f"these are not records of Flower: {error}") from error


def _record(kind: str, rows: list[Any], arrays: Mapping[str, "np.ndarray[Any, Any]"]) -> Any:
    _refuse_twice(rows)
    if kind == "arrays":
        return ArrayRecord({
            key: Array(dtype=dtype, shape=tuple(shape), stype=stype, data=arrays[blob].tobytes())
            for key, dtype, shape, stype, blob in rows
        })  # fmt: skip
    of_kind: Any = {"metrics": MetricRecord, "config": ConfigRecord}[kind]
    return of_kind({key: _value(item, arrays) for key, item in rows})


def _refuse_twice(rows: list[Any]) -> None:
    """Raise ValueError if two rows have the same name: one of them would be lost."""
    names = [row[0] for row in rows]
    if len(set(names)) < len(names):
        raise ValueError(f"a name occurs twice in {names}")


def _value(item: Any, arrays: Mapping[str, "np.ndarray[Any, Any]"]) -> Any:
    if isinstance(item, dict):
        return arrays[item["bytes"]].tobytes() if "bytes" in item else [_value(one, arrays) for one in item["list"]]
    return item


# ------------------------------------------------------------ the arrays of a model


def arrays_of(record: ArrayRecord) -> Arrays:
    """Return the arrays of a record in their form on the wire: dtypes in `CAST` as float32.

    Raises:
        TaskBroken: an array has a dtype, a name or a shape that no model of Atoll may have; the message lists all of
            them.
    """
    return travelling({key: array.numpy() for key, array in record.items()})


def travelling(arrays: Arrays) -> Arrays:
    """Convert an app's arrays to their form on the wire: `CAST` to float32; others are not copied if contiguous.

    Raises:
        TaskBroken: as `arrays_of`, or no tensor of a model may have the name or the shape.
    """
    faults = [*_faults_of(arrays)] if arrays else ["there is no array in the record"]
    if faults:
        raise TaskBroken(*faults)
    return {
        key: np.ascontiguousarray(a, dtype=CAST.get(a.dtype, a.dtype)).reshape(a.shape) for key, a in arrays.items()
    }


def _faults_of(arrays: Arrays) -> Iterator[str]:
    for name, array in arrays.items():
        if array.dtype not in CAST and array.dtype not in AVERAGED:
            yield f"{name} is {array.dtype}: only float16, float32, float64, int32 and int64 are averaged natively"
        if array.ndim > DIMS_MAX:
            yield f"{name} has {count_of(array.ndim, 'dimension')}: natively at most {DIMS_MAX}"
        if not 1 <= len(name) <= NAME_MAX or not name.isprintable() or name == "__metadata__":
            yield (
                f"the array {name[:80]!r} has a name that no model's file has: natively it has 1 to {NAME_MAX} "
                "printable characters"
            )


def casts_of(record: ArrayRecord) -> dict[str, str]:
    """Return the app's dtype of each array that is sent in another dtype."""
    dtypes = {key: np.dtype(array.dtype) for key, array in record.items()}
    return {key: dtype.name for key, dtype in dtypes.items() if dtype in CAST}


def record_of(arrays: Mapping[str, np.ndarray[Any, Any]], order: list[str], casts: Mapping[str, str]) -> ArrayRecord:
    """Return a record of copies of arrays, in the app's order and with the app's dtypes."""
    return ArrayRecord({key: Array(in_app(arrays[key], casts.get(key))) for key in order})


def in_app(array: "np.ndarray[Any, Any]", dtype: str | None) -> "np.ndarray[Any, Any]":
    """Return an array from the wire in the app's dtype; None: its dtype has not changed."""
    return array if dtype is None else np.asarray(array, dtype=dtype)
