"""The arguments of the calls, checked before anything runs."""

import math
import shutil
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from numbers import Integral, Real
from os import PathLike, fspath
from pathlib import Path

from atoll.interface.errors import AtollError


def folder_of(what: str, value: object) -> Path:
    """Check that an argument is a path, and return it.

    Raises:
        AtollError: it is no path.
    """
    if isinstance(value, str | PathLike) and (text := fspath(value)) and isinstance(text, str) and "\0" not in text:
        return Path(text)
    raise AtollError(f"{what}: got {value!r}; allowed: the path of a folder")


@contextmanager
def folder_for(out: object) -> Iterator[Path]:
    """Provide the folder that a call names, or a temporary one, which is deleted if the call fails.

    Raises:
        AtollError: as `folder_of`.
    """
    if out is not None:
        yield folder_of("out", out)
        return
    folder = Path(tempfile.mkdtemp(prefix="atoll-"))
    try:
        yield folder
    except BaseException:
        shutil.rmtree(folder, ignore_errors=True)
        raise


def check_whole(what: str, value: object, least: int, most: int = 2**31) -> None:
    """Check that an argument is a whole number within bounds.

    Raises:
        AtollError: it is no such number, or outside of the bounds.
    """
    if isinstance(value, bool) or not isinstance(value, Integral) or not least <= int(value) <= most:
        raise AtollError(f"{what}: got {value!r}; allowed: a whole number, at least {least}, at most {most}")


def check_between(what: str, value: object, least: float, most: float) -> None:
    """Check that an argument is a number within bounds.

    Raises:
        AtollError: it is no such number, or outside of the bounds.
    """
    if isinstance(value, bool) or not isinstance(value, Real) or not least <= float(value) <= most:
        raise AtollError(f"{what}: got {value!r}; allowed: a number, at least {least:g}, at most {most:g}")


def check_text(what: str, value: object) -> None:
    """Check that an argument is a string that UTF-8 can encode.

    Raises:
        AtollError: it is no string, or has a lone surrogate, which UTF-8 cannot encode.
    """
    if not isinstance(value, str) or any("\ud800" <= letter <= "\udfff" for letter in value):
        raise AtollError(f"{what}: got {value!r}; allowed: a string")


def check_target(target: object) -> None:
    """Check the value of a metric that runs may reach.

    Raises:
        AtollError: it is no finite number.
    """
    if target is None or (isinstance(target, Real) and not isinstance(target, bool) and math.isfinite(target)):
        return
    raise AtollError(f"target: got {target!r}; allowed: a finite number, or None")
