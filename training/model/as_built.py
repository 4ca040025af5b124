"""The first state of Python objects: attributes, hooks, flags, counters, generators of a model or a loss.

A warm worker trains and evaluates many times with one model. State that a forward pass, a loss or a loop leaves on it
must not reach the next job, whose result would depend on earlier work of its process. Restoring a state costs some
microseconds a module; rebuilding the model costs its whole construction.
"""

import sys
from collections import OrderedDict, deque
from collections.abc import Iterable, Iterator, Mapping
from functools import lru_cache, partial
from types import BuiltinFunctionType, FunctionType, MethodType, ModuleType
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np

from atoll.training.model.places import (
    PLAIN,
    TENSORS,
    Attributes,
    Cell,
    Dictionary,
    Drawn,
    Empty,
    Flags,
    Kind,
    Listing,
    PlainAttributes,
    SetOf,
    Values,
    Variable,
    attribute,
    flags_of_process,
    generator_cell,
    is_data,
    is_tensor,
    item,
    storage,
)

if TYPE_CHECKING or TENSORS:
    import torch
    from torch import nn
    from torch.jit import ScriptModule

WALKED_MAX = 10_000
"""Largest size of a container whose elements are searched; of a longer container only the elements are kept."""

GENERATORS_IN, EXAMPLES_FROM = 1_000, 100
"""Largest number of objects of a data set, and of elements of its containers, that are searched for generators: more of
them are its examples."""

BYTES_MAX = 64 << 20
"""Largest size of tensors and arrays that are copied to restore them [bytes]; a change of the others cannot be
undone."""

LIBRARIES = {"torch", "numpy", "atoll", *sys.stdlib_module_names}
"""Packages whose classes and functions keep no state of a task in their attributes and globals."""

CLOSED = {
    "logging",
    "threading",
    "_thread",
    "io",
    "_io",
    "weakref",
    "_weakref",
    "socket",
    "subprocess",
    "queue",
    "asyncio",
}
"""Packages whose objects are not searched: files, locks and logs cannot be restored."""

COMPILERS = ("torch._dynamo", "torch._inductor", "torch.fx", "torch.jit", "torch._C")
"""Packages of torch whose objects hold compiled code."""

CACHED = type(lru_cache(lambda: None))
"""The type of a function that caches its results."""

INSIDE = ("_parameters", "_buffers", "_modules")
"""The dictionaries of a module whose entries are attributes to its user."""

EMPTY = (dict, OrderedDict, set)
"""The containers of hooks of each torch module."""


class Restored(NamedTuple):
    """The result of restoring a state."""

    changed: list[str]
    """The paths of values that had changed, and are restored."""
    kept: list[str]
    """The paths of values that cannot be restored."""


class AsBuilt:
    """Snapshot of the state of some objects, and of all that they hold in Python.

    Attributes, slots, lists, dictionaries and sets, hooks, flags of parameters, generators, tensors and arrays;
    closures and plain globals of functions; class attributes of a task's classes. The state of C objects and files is
    left out.

    Args:
        roots: objects by the names that their differences get.
        filled: tensors whose values each job loads or checks.
        with_process: torch's hooks of all modules and the flags of this process and thread, too.
        with_caches: cached results of functions (`functools.lru_cache`), too; caches with new results are emptied.
    """

    def __init__(
        self,
        roots: Mapping[str, Any],
        filled: "Iterable[torch.Tensor]" = (),
        *,
        with_process: bool = False,
        with_caches: bool = False,
    ) -> None:
        self._with_caches = with_caches
        self._cells: list[Cell] = [*flags_of_process()] if with_process else []
        self._bytes, self._walked_max = 0, WALKED_MAX
        self.is_complete = True
        """Whether the whole state can be restored: no iterator is held, and no tensors or arrays beyond `BYTES_MAX`,
        besides parameters, which no call writes to."""
        self._filled = {id(tensor) for tensor in filled}
        self._seen: set[int] = set()
        self._walk([*roots.items(), *(_hooks_of_all_modules() if with_process else ())])

    def _walk(self, roots: Iterable[tuple[str, Any]], most: int | None = None) -> None:
        held: list[Any] = []  # a freed object would leave its id to another
        waiting = deque(roots)
        while waiting and (most is None or len(held) < most):  # no recursion: a chain of objects may be long
            path, value = waiting.popleft()
            if isinstance(value, PLAIN) or id(value) in self._seen:
                continue
            self._seen.add(id(value))
            held.append(value)
            waiting.extend(self._watch(path, value))
        self._seen = set()

    @classmethod
    def of_parts(cls, parts: "Iterable[nn.Module]") -> "AsBuilt":
        """Make a snapshot of only the data in the attributes of a sharded model's modules."""
        found = cls({})
        for part in parts:
            for path, module in part.named_modules():
                if not _is_of_task(type(module)):
                    continue
                place = PlainAttributes(path, vars(module))
                found._cells.append(place)
                found._walk((attribute(path, name), value) for name, value in place.first.items())
        return found

    @classmethod
    def generators_of(cls, value: Any) -> list[Drawn]:
        """Return the places of the random generators in an object, the nearest first."""
        found = cls({})
        found._bytes, found._walked_max = BYTES_MAX, EXAMPLES_FROM  # no tensor is copied
        found._walk([("", value)], GENERATORS_IN)
        return [cell for cell in found._cells if isinstance(cell, Drawn)]

    @property
    def size(self) -> int:
        """The number of places (containers, attributes, tensors, ...) that are recorded."""
        return len(self._cells)

    def differences(self) -> list[str]:
        """Return the paths of changed values."""
        return [path for cell in self._cells if not cell.is_same() and (path := cell.changed())]

    def restore(self) -> Restored:
        """Restore the state in place: existing references stay valid."""
        changed, kept = list[str](), list[str]()
        for cell in [cell for cell in self._cells if not cell.is_same()]:
            path = cell.changed()
            if not cell.restore():
                kept.append(cell.path)
            elif path:
                changed.append(path)
        return Restored(changed, kept)

    def _watch(self, path: str, value: Any) -> Iterable[tuple[str, Any]]:
        """Record one value; return the values that it holds, with their paths."""
        if isinstance(value, dict):
            return self._dict(path, value)
        if isinstance(value, list | deque | set | tuple | frozenset):
            return self._sequence(path, value)
        if isinstance(value, (*TENSORS, np.ndarray)):
            return self._values(path, value)
        if (generator := generator_cell(path, value)) is not None:
            self._cells.append(generator)
            return ()
        if isinstance(value, FunctionType):
            return self._function(path, value)
        if isinstance(value, CACHED):
            return self._cache(path, value)
        if isinstance(value, MethodType | partial):
            return [(path, part) for part in _called(value)]
        if isinstance(value, type):
            return self._class(value)
        if isinstance(value, ModuleType | BuiltinFunctionType) or _is_closed(value):
            return ()
        return self._object(path, value)

    def _dict(self, path: str, value: dict[Any, Any]) -> Iterable[tuple[str, Any]]:
        self._cells.append(Dictionary(path, value))
        kind = storage(value)
        return [(item(path, k), v) for k, v in kind.items(value)] if kind.__len__(value) <= self._walked_max else ()

    def _sequence(self, path: str, value: Any) -> Iterable[tuple[str, Any]]:
        if not isinstance(value, tuple | frozenset):
            self._cells.append((SetOf if isinstance(value, set) else Listing)(path, value))
        return [(f"{path}[{n}]", part) for n, part in enumerate(value)] if len(value) <= self._walked_max else ()

    def _attributes(self, path: str, held: dict[str, Any]) -> Iterator[tuple[str, Any]]:
        """Record the dictionary of an object's attributes, and yield the attributes with their paths."""
        self._cells.append(Dictionary(path, held, is_of_object=True))
        for name, part in held.items():
            if name in INSIDE and isinstance(part, dict) and part:
                yield from self._attributes(path, part)
            else:
                yield attribute(path, name), part

    def _values(self, path: str, value: Any) -> Iterator[tuple[str, Any]]:
        if is_tensor(value):
            yield from self._attributes(path, value.__dict__)
            if value.is_leaf:
                yield from self._named(path, value, ("_backward_hooks", "_post_accumulate_grad_hooks"))
            if id(value) in self._filled or value.is_meta or value.layout != torch.strided:
                self._cells.append(Flags(path, value))
                return
        elif value.dtype == object:
            return
        is_kept = self._bytes + value.nbytes <= BYTES_MAX
        self._bytes += value.nbytes if is_kept else 0
        self.is_complete &= is_kept or (is_tensor(value) and isinstance(value, nn.Parameter))
        self._cells.append(Values(path, value, is_kept))

    def _named(self, path: str, owner: Any, names: Iterable[str]) -> Iterator[tuple[str, Any]]:
        """Record and yield some attributes of an object that are in no dictionary."""
        cell = Attributes(path, owner, names)
        if cell.first:
            self._cells.append(cell)
        yield from ((attribute(path, name), part) for name, part in cell.first)

    def _function(self, path: str, function: FunctionType) -> Iterator[tuple[str, Any]]:
        if _is_of(function.__module__, LIBRARIES):
            return
        yield from self._attributes(path, function.__dict__)
        yield from ((path, part) for part in (function.__defaults__, function.__kwdefaults__, *_wrapped(function)))
        for name, place in zip(function.__code__.co_freevars, function.__closure__ or (), strict=True):
            cell = Variable.of_closure(f"nonlocal {name}", place)
            if name != "__class__":
                self._cells.append(cell)
                yield cell.path, cell.value
        known = function.__globals__
        names = [name for name in _names_in(function.__code__) if name in known and is_data(known[name])]
        self._cells += [Variable.of_module(f"global {name}", known, name) for name in names]
        yield from ((f"global {name}", known[name]) for name in _names_in(function.__code__) if name in known)

    def _cache(self, path: str, function: Any) -> Iterable[tuple[str, Any]]:
        if self._with_caches:
            size, empty = (lambda: function.cache_info().currsize), (lambda _: function.cache_clear())
            self._cells.append(Drawn(path, size, empty))
        return [(path, function.__wrapped__)]

    def _class(self, kind: type) -> Iterator[tuple[str, Any]]:
        """Record the plain attributes of a task's class and its bases; yield them and what their methods use."""
        for base in kind.__mro__[:-1]:
            if not _is_of(base.__module__, LIBRARIES):
                own = vars(base).items()
                data = [name for name, value in own if is_data(value) and not name.startswith("__")]
                yield from self._named(base.__name__, base, data)
                yield from ((base.__name__, part) for _, part in own if isinstance(part, FunctionType))

    def _empty(self, path: str, held: dict[str, Any]) -> Empty:
        """Record all empty containers of a torch module as one `Empty`: it has a dozen of them, mostly for hooks."""
        every = {name: part for name, part in held.items() if name.startswith("_") and type(part) in EMPTY}
        found = Empty(path, {name: part for name, part in every.items() if not part and id(part) not in self._seen})
        self._seen.update(map(id, found.now.values()))
        return found

    def _object(self, path: str, value: Any) -> Iterator[tuple[str, Any]]:
        held, kind = getattr(value, "__dict__", None), type(value)
        self.is_complete &= held is not None or not isinstance(value, Iterator)  # its place is in no attribute
        if isinstance(held, dict):
            self._cells.append(Kind(path, value))
            if TENSORS and isinstance(value, nn.Module):
                self._cells.append(self._empty(path, held))
            yield from self._attributes(path, held)
        slots = [name for base in kind.__mro__ for name in _slots_of(base)]
        yield from self._named(path, value, slots)
        yield path, kind


def _hooks_of_all_modules() -> list[tuple[str, Any]]:
    every = [(name, hooks) for name, hooks in vars(torch.nn.modules.module).items() if name.startswith("_global_")]
    return [(name.strip("_"), hooks) for name, hooks in every if isinstance(hooks, dict)]


def _is_of(module: Any, packages: Iterable[str]) -> bool:
    return str(module).partition(".")[0] in packages


def _is_of_task(kind: type) -> bool:
    """Return whether a class, or one of its bases, belongs neither to Python nor to torch nor to Atoll."""
    return any(not _is_of(base.__module__, LIBRARIES) for base in kind.__mro__)


def _is_closed(value: Any) -> bool:
    module = str(type(value).__module__)
    if module.startswith("atoll.task.task"):
        return True  # a whole task, whose data functions may keep their data
    return _is_of(module, CLOSED) or module.startswith(COMPILERS) or (bool(TENSORS) and isinstance(value, ScriptModule))


def _slots_of(base: type) -> list[str]:
    slots = base.__dict__.get("__slots__", ())
    names = [slots] if isinstance(slots, str) else list(slots)
    return [] if _is_of(base.__module__, LIBRARIES - {"atoll"}) else [n for n in names if not n.startswith("__")]


def _called(value: Any) -> tuple[Any, ...]:
    """Return the objects that a method or a partial call holds: function, instance, arguments."""
    return (
        (value.__self__, value.__func__) if isinstance(value, MethodType) else (value.func, value.args, value.keywords)
    )


def _wrapped(function: FunctionType) -> list[Any]:
    return [function.__wrapped__] if hasattr(function, "__wrapped__") else []


def _names_in(code: Any) -> list[str]:
    """Return the names that a function's code, and the functions inside it, look up."""
    inner = [part for part in code.co_consts if hasattr(part, "co_names")]
    return [*code.co_names, *(name for part in inner for name in _names_in(part))]
