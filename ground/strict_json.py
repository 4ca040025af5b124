"""The strict readers of a manifest's JSON: every value has one type and one range.

Each reader takes a value and its path within the manifest, and returns the value, or raises ManifestError with the
path, the value (shortened) and what is allowed. A bool is no integer, an integer is no float.
"""

import json
import math
import reprlib
import struct
from bisect import bisect_left
from collections.abc import Collection, Iterable
from typing import Any, NoReturn, cast

from atoll.ground.printable import count_of

INT64_MAX = 2**63 - 1

_short = reprlib.Repr()
_short.maxstring = _short.maxother = _short.maxlong = 60


class ManifestError(ValueError):
    """Bytes that are no canonical manifest; the text has the path, the value and the allowed values."""


def refuse(path: str, value: object, allowed: str) -> NoReturn:
    """Raise ManifestError for the value at `path`."""
    raise ManifestError(f"{path}: got {_short.repr(value)}; allowed: {allowed}")


def read_object(data: bytes, *, num_bytes_max: int, what: str = "manifest") -> dict[str, Any]:
    """Decode one JSON object, `what`: ASCII, no key twice, no NaN or Infinity, no nesting beyond Python's limit.

    The worst that 4 MiB can hold (a million empty lists) costs about 0.3 s and 100 MB, once, before it is refused.
    """
    if len(data) > num_bytes_max:
        raise ManifestError(f"{what}: {count_of(len(data), 'byte')}; allowed: at most {num_bytes_max}")
    try:
        document = json.loads(data.decode("ascii"), object_pairs_hook=_no_key_twice, parse_constant=_no_constant)
    except ManifestError as fault:
        raise ManifestError(f"{what}: {fault}") from None
    except (ValueError, RecursionError) as error:  # not ASCII, no JSON, an integer of thousands of digits, deep nesting
        raise ManifestError(f"{what}: not JSON in ASCII: {_short.repr(str(error))}") from None
    if type(document) is not dict:
        refuse(what, document, "an object")
    return document


def _no_key_twice(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    fields = dict(pairs)
    if len(fields) < len(pairs):
        names = [name for name, _ in pairs]
        twice = next(name for index, name in enumerate(names) if name in names[:index])
        raise ManifestError(f"key {_short.repr(twice)} occurs twice in one object")
    return fields


def _no_constant(literal: str) -> NoReturn:
    raise ManifestError(f"got {literal}; allowed: finite numbers")


def fields_of(value: object, path: str, *, keys: frozenset[str]) -> dict[str, Any]:
    """Check that a JSON value is an object with exactly the given keys, and return it."""
    if type(value) is not dict:
        refuse(path, value, "an object")
    if value.keys() == keys:  # the common case
        return value
    for name in value.keys() - keys:
        refuse(path, name, f"the keys {', '.join(sorted(keys))}")
    for name in sorted(keys - value.keys()):
        raise ManifestError(f"{path}: key {name!r} is missing")
    return value


def items_of(value: object, path: str, *, num_max: int) -> list[Any]:
    """Check that a JSON value is a list of at most `num_max` items, and return it."""
    if type(value) is not list:
        refuse(path, value, "a list")
    if len(value) > num_max:
        raise ManifestError(f"{path}: {count_of(len(value), 'item')}; allowed: at most {num_max}")
    return value


def constant(value: object, path: str, *, expected: str) -> None:
    """Check that a JSON value is exactly the expected string."""
    if type(value) is not str or value != expected:
        refuse(path, value, repr(expected))


def one_of(value: object, path: str, *, allowed: Collection[str]) -> str:
    """Check that a JSON value is one of the allowed strings, and return it."""
    if type(value) is not str or value not in allowed:
        refuse(path, value, " | ".join(sorted(allowed)))
    return value


def text(value: object, path: str, *, num_max: int, refused: Iterable[str] = ()) -> str:
    """Check that a JSON value is a string of 1 to `num_max` printable characters (no line break), and return it."""
    if type(value) is not str or not 1 <= len(value) <= num_max or not value.isprintable():
        refuse(path, value, f"1 to {count_of(num_max, 'printable character')}")
    if value in refused:
        refuse(path, value, "a name that the file format does not reserve")
    return value


def integer(value: object, path: str, *, low: int, high: int) -> int:
    """Check that a JSON value is an integer in low..high, and return it."""
    if type(value) is not int or not low <= value <= high:
        refuse(path, value, f"an integer in {low}..{high}")
    return value


def number(value: object, path: str, *, low: int, high: int) -> int | float:
    """Check that a JSON value is an integer, or a float with a fraction, in low..high, and return it."""
    is_number = type(value) is int or (type(value) is float and not value.is_integer())
    if not is_number or not low <= cast(float, value) <= high:
        refuse(path, value, f"a number in {low}..{high}, whole ones without a point")
    return cast(float, value)


def finite(value: object, path: str) -> float:
    """Check that a JSON value is a finite float, and return it."""
    if type(value) is not float or not math.isfinite(value):
        refuse(path, value, "a finite float")
    return value


def within(value: object, path: str, *, low: float, high: float) -> float:
    """Check that a JSON value is a float in low..high, and return it."""
    if type(value) is not float or not low <= value <= high:
        refuse(path, value, f"a float in {low:g}..{high:g}")
    return value


def exact(number: float) -> str:
    """Return a float as the 16 hexadecimal digits of its bits."""
    return struct.pack(">d", number).hex()


def inexact(digits: object, path: str, *, low: float) -> float:
    """Check that a JSON value is `exact` of a finite number above `low`, and return the number."""
    if type(digits) is not str or len(digits) != 16 or digits.strip("0123456789abcdef"):
        refuse(path, digits, "the 16 hexadecimal digits of a float")
    number = float(struct.unpack(">d", bytes.fromhex(digits))[0])
    if not (math.isfinite(number) and number > low):
        refuse(path, number, f"a finite number above {low:g}")
    return number


def sha256_hex(value: object, path: str) -> str:
    """Check that a JSON value is a string of 64 lower-case hexadecimal digits, and return it."""
    if type(value) is not str or len(value) != 64 or value.strip("0123456789abcdef"):
        refuse(path, value, "64 lower-case hexadecimal digits")
    return value


def check_canonical(expected: bytes, data: bytes) -> None:
    """Raise ManifestError unless the bytes of a manifest are the canonical ones."""
    if expected != data:
        at = bisect_left(range(len(data)), True, key=lambda index: expected[: index + 1] != data[: index + 1])
        raise ManifestError(
            f"manifest: not canonical from byte {at} on: keys sorted, no spaces, ASCII, shortest floats"
        )
