"""Flower's records as bytes, and as the named arrays of a model.

A packed `RecordDict` is a header and the bytes of its arrays and byte strings, one after another:

    8 bytes   n, little-endian
    n bytes   JSON: [[name, kind, body], ...], kind "a" (arrays), "m" (metrics) or "c" (config)
    the rest  each array as [key, dtype, shape, stype, bytes], a byte string as {"bytes": count}, in the header's order

An array's bytes are Flower's own (`Array.data`), of any dtype and `stype`; unpacking gives equal records.
"""

import json
from collections.abc import Mapping
from typing import Any

import numpy as np
from flwr.app import Array, ArrayRecord, ConfigRecord, MetricRecord, RecordDict

from atoll.parallel.task.arrays import ALLOWED, Arrays
from atoll.parallel.task.errors import TaskBroken

CAST = {np.dtype(np.float64): np.dtype(np.float32), np.dtype(np.float16): np.dtype(np.float32)}
"""The dtypes that travel as others; the app gets them back as they were."""


def pack(records: RecordDict) -> bytes:
    """Return all records as bytes."""
    blobs: list[bytes] = []
    header = [[name, *_packed(record, blobs)] for name, record in records.items()]
    text = json.dumps(header).encode()
    return b"".join([len(text).to_bytes(8, "little"), text, *blobs])


def unpack(packed: bytes | memoryview) -> RecordDict:
    """Return the records of `pack`.

    Raises:
        ValueError: the bytes are not of this form.
    """
    view = memoryview(packed)
    end = 8 + int.from_bytes(view[:8], "little")
    try:
        header = json.loads(bytes(view[8:end]))
        blobs = _Blobs(view[end:])
        found = RecordDict({name: _unpacked(kind, body, blobs) for name, kind, body in header})
    except (ValueError, TypeError, KeyError) as error:
        raise ValueError(f"these are no packed records: {error}") from error
    if blobs.left:
        raise ValueError(f"these are no packed records: {blobs.left} bytes are left")
    return found


def _packed(record: Any, blobs: list[bytes]) -> tuple[str, Any]:
    if isinstance(record, ArrayRecord):
        rows = [[key, a.dtype, list(a.shape), a.stype, len(a.data)] for key, a in record.items()]
        blobs += [array.data for array in record.values()]
        return "a", rows
    kind = "m" if isinstance(record, MetricRecord) else "c"
    return kind, [[key, _plain(value, blobs)] for key, value in record.items()]


def _plain(value: Any, blobs: list[bytes]) -> Any:
    if isinstance(value, bytes):
        blobs.append(value)
        return {"bytes": len(value)}
    if isinstance(value, list) and any(isinstance(item, bytes) for item in value):
        return {"list": [_plain(item, blobs) for item in value]}
    return value


def _unpacked(kind: str, body: Any, blobs: "_Blobs") -> Any:
    if kind == "a":
        return ArrayRecord(
            {
                key: Array(dtype=dtype, shape=tuple(shape), stype=stype, data=blobs.take(size))
                for key, dtype, shape, stype, size in body
            }
        )
    of_kind = {"m": MetricRecord, "c": ConfigRecord}[kind]
    return of_kind({key: _value(value, blobs) for key, value in body})


def _value(value: Any, blobs: "_Blobs") -> Any:
    if isinstance(value, dict):
        return blobs.take(value["bytes"]) if "bytes" in value else [_value(item, blobs) for item in value["list"]]
    return value


class _Blobs:
    """The bytes after a header, taken one after another."""

    def __init__(self, view: memoryview) -> None:
        self._view, self._at = view, 0

    @property
    def left(self) -> int:
        return len(self._view) - self._at

    def take(self, size: int) -> bytes:
        if size > self.left:
            raise ValueError(f"{size} bytes are missing")
        self._at += size
        return bytes(self._view[self._at - size : self._at])


# ------------------------------------------------------------ the arrays of a model


def arrays_of(record: ArrayRecord) -> Arrays:
    """Return the arrays of a record, as they travel: those in `CAST` as float32.

    Raises:
        TaskBroken: an array has a dtype that no model of Atoll has; the message lists all of them.
    """
    arrays = {key: array.numpy() for key, array in record.items()}
    faults = [
        f"{key} is {array.dtype}: only float16, float32, float64, int8 to int64 and uint8 are averaged natively"
        for key, array in arrays.items()
        if array.dtype not in CAST and array.dtype not in ALLOWED
    ]
    if not arrays:
        faults.append("there is no array in the record")
    if faults:
        raise TaskBroken("; ".join(faults))
    return {
        key: np.ascontiguousarray(a.astype(CAST.get(a.dtype, a.dtype))).reshape(a.shape) for key, a in arrays.items()
    }


def casts_of(record: ArrayRecord) -> dict[str, str]:
    """Return the app's dtype of each array that travels as another."""
    dtypes = {key: np.dtype(array.dtype) for key, array in record.items()}
    return {key: dtype.name for key, dtype in dtypes.items() if dtype in CAST}


def record_of(arrays: Mapping[str, np.ndarray[Any, Any]], order: list[str], casts: Mapping[str, str]) -> ArrayRecord:
    """Return a record of its own copies of arrays, in the app's order and with the app's dtypes."""
    return ArrayRecord({key: Array(np.array(arrays[key], dtype=casts.get(key, arrays[key].dtype))) for key in order})
