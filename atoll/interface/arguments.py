"""The arguments of the calls, checked before anything runs."""

import math
from numbers import Real
from os import PathLike, fspath
from pathlib import Path

from atoll.interface.errors import AtollError


def folder_of(what: str, value: object) -> Path:
    """Return the folder that a call names.

    Raises:
        AtollError: it is no path.
    """
    if isinstance(value, str | PathLike) and (text := fspath(value)) and isinstance(text, str) and "\0" not in text:
        return Path(text)
    raise AtollError(f"{what}: got {value!r}; allowed: the path of a folder")


def check_target(target: object) -> None:
    """Check the value of a metric that runs may reach.

    Raises:
        AtollError: it is no finite number.
    """
    if target is None or (isinstance(target, Real) and not isinstance(target, bool) and math.isfinite(target)):
        return
    raise AtollError(f"target: got {target!r}; allowed: a finite number, or None")
