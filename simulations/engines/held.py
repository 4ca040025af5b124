"""Marks of what an object holds between its calls, which show whether a call has changed any of it."""

import inspect
import random
from collections import deque
from collections.abc import Iterator
from types import FunctionType, ModuleType
from typing import Any

import numpy as np
import torch

MARKS_MAX = 2_000
"""Maximum number of marks of an object; what lies beyond is not watched."""

BYTES_MAX = 1 << 20
"""Maximum size of an array whose contents are compared [bytes]."""

Marks = dict[str, object]


def marks_of(held: object) -> Marks:
    """Return marks of an object by path: its attributes, those of its classes, and what their methods refer to.

    Equal marks mean that nothing has changed, except what is in larger arrays, in objects of C and in files.
    """
    found: Marks = {}
    seen: set[int] = set()
    for path, value in (("", held), *_around(type(held))):
        _walk(path, value, found, seen)
    return found


def changed(before: Marks, after: Marks) -> str | None:
    """Return the path of what has changed, or what is new; None: nothing."""
    paths = (path for path in [*before, *after] if before.get(path, Marks) != after.get(path, Marks))
    return next(paths, None)


def _around(kind: type) -> Iterator[tuple[str, object]]:
    """Yield the attributes of classes, and the globals and the closures of their methods."""
    for base in kind.__mro__[:-1]:
        for name, value in vars(base).items():
            if isinstance(value, FunctionType):
                yield from ((form.format(name), part) for form, part in _referred(value))
            elif not name.startswith("__"):
                yield f"{base.__name__}.{name}", value


def _referred(function: FunctionType) -> Iterator[tuple[str, object]]:
    """Yield the globals that a function names, except functions, classes and modules, and what its closure holds."""
    code, known = function.__code__, function.__globals__
    for name in code.co_names:
        if name in known and not isinstance(known[name], FunctionType | type | ModuleType):
            yield "global " + _plain(name), known[name]
    cells = zip(code.co_freevars, function.__closure__ or (), strict=True)
    yield from (("nonlocal " + _plain(name), cell.cell_contents) for name, cell in cells if name != "__class__")


def _walk(path: str, value: Any, found: Marks, seen: set[int]) -> None:
    if len(found) > MARKS_MAX:
        return
    if isinstance(value, int | float | complex | str | bytes | None):
        found[path] = repr(value)
        return
    if (
        id(value) in seen
        or isinstance(value, type | ModuleType)
        or (callable(value) and not hasattr(value, "__dict__"))
    ):
        return
    seen.add(id(value))
    found[path] = id(value), _contents(value)
    for name, part in _parts(value):
        _walk(name.format(path) if path else name.format("").lstrip("."), part, found, seen)


def _parts(value: Any) -> Iterator[tuple[str, Any]]:
    """Yield the parts of a value with the form of their paths."""
    if isinstance(value, dict):
        yield from (("{}[" + _plain(repr(key)) + "]", part) for key, part in list(value.items()))
    elif isinstance(value, list | tuple | set | frozenset | deque):
        yield from (("{}[" + str(number) + "]", part) for number, part in enumerate(list(value)))
    elif isinstance(value, FunctionType):
        yield from _referred(value)
    elif not isinstance(value, torch.Tensor | np.ndarray) and not inspect.ismethod(value):
        yield from (("{}." + _plain(name), part) for name, part in list(getattr(value, "__dict__", {}).items()))


def _plain(text: str) -> str:
    return text[:60].replace("{", "{{").replace("}", "}}")


def _contents(value: Any) -> object:
    """Return what shows a change in place."""
    if isinstance(value, torch.Tensor):
        return value._version
    if isinstance(value, torch.Generator):
        return bytes(value.get_state().numpy())
    if isinstance(value, random.Random):
        return value.getstate()
    if isinstance(value, np.random.Generator):
        return repr(value.bit_generator.state)
    if isinstance(value, np.random.RandomState):
        return repr(value.get_state(legacy=False))
    if isinstance(value, np.ndarray):
        return value.tobytes() if value.nbytes <= BYTES_MAX else None
    return len(value) if isinstance(value, dict | list | set | deque) else None
