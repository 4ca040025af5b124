"""The places where Python and torch hold state (dictionaries, closures, tensors, ...), each compared and restored."""

import os
import random
import sys
from collections import OrderedDict, deque
from collections.abc import Callable, Iterable, Iterator
from functools import partial
from operator import is_
from types import CellType
from typing import TYPE_CHECKING, Any, TypeGuard

import numpy as np

from atoll.training.optimizers.dtensor import is_dtensor

if TYPE_CHECKING or "torch" in sys.modules:
    import torch
    from torch import nn

    TENSORS: tuple[type, ...] = (torch.Tensor,)
    GENERATORS: tuple[type, ...] = (torch.Generator, random.Random, np.random.Generator, np.random.RandomState)
    OF_TORCH = frozenset(vars(nn.Module()))
    """The attributes that torch gives to each module."""
else:  # a numpy task at a site without torch: this is imported after the task
    TENSORS, OF_TORCH = (), frozenset()
    GENERATORS = (random.Random, np.random.Generator, np.random.RandomState)

SET_BY_EACH_JOB = ("training",)
"""Attributes that each training and evaluation sets: their differences are not named."""

PLAIN = (bool, int, float, complex, str, bytes, type(None))
"""Types of values that compare by their contents."""

DATA: tuple[type, ...] = (*PLAIN, *TENSORS, np.ndarray, dict, list, tuple, set, frozenset, deque, *GENERATORS)


def is_tensor(value: Any) -> "TypeGuard[torch.Tensor]":
    """Return whether a value is a tensor of torch."""
    return isinstance(value, TENSORS)


def is_data(value: Any) -> bool:
    """Return whether a value is data: a number, a string, None, a tensor, an array, a generator, or a container."""
    return isinstance(value, DATA)


def _is_given_back(value: Any) -> bool:
    """Return whether a variable's first value replaces its present one: data, or a model with parameters on meta."""
    if is_data(value) or not TENSORS or not isinstance(value, torch.nn.Module):
        return is_data(value)
    return any(parameter.is_meta for parameter in value.parameters())


def is_generator(value: Any) -> bool:
    """Return whether a value is a random generator with a state, which secret and system generators lack."""
    if isinstance(value, np.random.Generator | np.random.RandomState):
        bits: Any = value.bit_generator if isinstance(value, np.random.Generator) else value._bit_generator
        return str(type(bits).__module__).startswith("numpy.")
    return isinstance(value, GENERATORS) and not isinstance(value, random.SystemRandom)


def generator_cell(path: str, value: Any) -> "Drawn | None":
    """Return the place of a random generator; None: the value is no generator, or has no state."""
    if not is_generator(value):
        return None
    if TENSORS and isinstance(value, torch.Generator):
        return Drawn(path, value.get_state, value.set_state, value)
    if isinstance(value, random.Random):
        return Drawn(path, value.getstate, value.setstate, value)
    if isinstance(value, np.random.RandomState):
        return Drawn(path, partial(value.get_state, legacy=False), value.set_state, value)
    if isinstance(value, np.random.Generator):
        bits = value.bit_generator
        return Drawn(path, lambda: bits.state, lambda state: setattr(bits, "state", state), value)
    return None


def attribute(path: str, name: str) -> str:
    """Return the path of an object's attribute, for a message."""
    return f"{path}.{name}" if path else name


def item(path: str, key: Any) -> str:
    """Return the path of an entry of a container, for a message."""
    return f"{path}[{repr(key)[:60]}]"


def storage(held: dict[Any, Any]) -> type[dict[Any, Any]]:
    """Return Python's class of a dictionary: its methods read and write the stored values.

    A derived class may compute more: a library's table may import a module for each entry that is read.
    """
    return OrderedDict if isinstance(held, OrderedDict) else dict


def _contents(cell: CellType) -> Any:
    try:
        return cell.cell_contents
    except ValueError:  # not filled yet
        return Cell


def _differ(one: Any, other: Any) -> bool:
    """Return whether two values differ, as far as they compare; objects that are no data differ by identity."""
    if one is other:
        return False
    if type(one) is not type(other) or not isinstance(one, (*PLAIN, list, tuple, dict, set)):
        return True
    try:
        return bool(one != other)
    except Exception:  # of tensors in a list
        return True


def _form(tensor: "torch.Tensor") -> tuple[Any, ...]:
    return tensor.shape, tensor.dtype, tensor.device, tensor.layout


class Cell:
    """The place of one recorded value: it compares the value with the first state, and restores it."""

    __slots__ = ("path",)

    def __init__(self, path: str) -> None:
        self.path = path

    def is_same(self) -> bool:
        """Return whether the value is unchanged since it was recorded."""
        raise NotImplementedError

    def changed(self) -> str:
        """Return the path of a changed value; empty: only the objects differ, with equal values."""
        return self.path

    def restore(self) -> bool:
        """Restore the first state; return whether that was possible."""
        raise NotImplementedError


class Dictionary(Cell):
    """A stored dictionary, or the attributes of an object."""

    __slots__ = ("is_of_object", "keys", "now", "storage", "values")

    def __init__(self, path: str, now: dict[Any, Any], *, is_of_object: bool = False) -> None:
        super().__init__(path)
        self.now, self.storage, self.is_of_object = now, storage(now), is_of_object
        self.keys, self.values = list(self.storage.keys(now)), list(self.storage.values(now))

    def is_same(self) -> bool:
        """Return whether the value is unchanged since it was recorded."""
        kind, now = self.storage, self.now
        if kind.__len__(now) != len(self.keys) or not all(map(is_, kind.values(now), self.values)):
            return False
        return all(map(is_, kind.keys(now), self.keys)) or list(kind.keys(now)) == self.keys

    def changed(self) -> str:
        """Return the path of the value if it has changed; empty: the values are equal."""
        first, now = dict(zip(self.keys, self.values, strict=True)), dict(self.storage.items(self.now))
        others = (key for key in {**now, **first} if _differ(first.get(key, Cell), now.get(key, Cell)))
        name = attribute if self.is_of_object else item
        return next((name(self.path, key) for key in others if key not in SET_BY_EACH_JOB), "")

    def restore(self) -> bool:
        """Restore the recorded value; return whether that was possible."""
        self.storage.clear(self.now)
        for key, value in zip(self.keys, self.values, strict=True):
            self.storage.__setitem__(self.now, key, value)
        return True


class PlainAttributes(Cell):
    """Data in the attributes of a module that a mesh has sharded: hooks, parameters and objects are the engine's."""

    __slots__ = ("count", "first", "now")

    def __init__(self, path: str, now: dict[str, Any]) -> None:
        super().__init__(path)
        self.now, self.count = now, len(now)
        self.first = {name: value for name, value in now.items() if name not in OF_TORCH and is_data(value)}

    def _new(self) -> list[str]:
        if len(self.now) == self.count:
            return []
        known = self.first.keys() | OF_TORCH
        return [name for name, value in self.now.items() if name not in known and name[:1] != "_" and is_data(value)]

    def is_same(self) -> bool:
        """Return whether the module's data are unchanged, and none are new."""
        return all(self.now.get(name, Cell) is value for name, value in self.first.items()) and not self._new()

    def changed(self) -> str:
        """Return the path of a changed value."""
        others = (name for name, value in self.first.items() if _differ(value, self.now.get(name, Cell)))
        return next((attribute(self.path, name) for name in (*others, *self._new())), "")

    def restore(self) -> bool:
        """Restore the module's data and remove new ones; return whether that was possible."""
        for name in self._new():
            del self.now[name]
        self.now.update(self.first)
        return True


class Empty(Cell):
    """The dictionaries and sets of a module that were all empty, such as its hooks."""

    __slots__ = ("now",)

    def __init__(self, path: str, now: dict[str, Any]) -> None:
        super().__init__(path)
        self.now = now

    def is_same(self) -> bool:
        """Return whether all of the containers are empty."""
        return not any(self.now.values())

    def changed(self) -> str:
        """Return the path of a container that is not empty."""
        return next((attribute(self.path, name) for name, held in self.now.items() if held), "")

    def restore(self) -> bool:
        """Empty all of the containers; return whether that was possible."""
        for held in self.now.values():
            held.clear()
        return True


class Listing(Cell):
    """The recorded state of a list or a deque."""

    __slots__ = ("now", "values")

    def __init__(self, path: str, now: Any) -> None:
        super().__init__(path)
        self.now, self.values = now, list(now)

    def is_same(self) -> bool:
        """Return whether the value is unchanged since it was recorded."""
        return len(self.now) == len(self.values) and all(map(is_, self.now, self.values))

    def changed(self) -> str:
        """Return the path of the first changed element, or the container's path if its length has changed."""
        if len(self.now) != len(self.values):
            return self.path
        pairs = enumerate(zip(self.now, self.values, strict=True))
        return next((f"{self.path}[{number}]" for number, (one, other) in pairs if _differ(one, other)), "")

    def restore(self) -> bool:
        """Restore the recorded value; return whether that was possible."""
        self.now.clear()
        self.now.extend(self.values)
        return True


class SetOf(Listing):
    """The recorded state of a set."""

    __slots__ = ()

    def is_same(self) -> bool:
        """Return whether the value is unchanged since it was recorded."""
        return bool(self.now == set(self.values))

    def changed(self) -> str:
        """Return the path of the set."""
        return self.path

    def restore(self) -> bool:
        """Restore the recorded value; return whether that was possible."""
        self.now.clear()
        self.now.update(self.values)
        return True


class Attributes(Cell):
    """Attributes that are in no writable dictionary: of a class, of an object with slots, of a tensor."""

    __slots__ = ("first", "owner")

    def __init__(self, path: str, owner: Any, names: Iterable[str]) -> None:
        super().__init__(path)
        self.owner, self.first = owner, [(name, getattr(owner, name)) for name in names if hasattr(owner, name)]

    def is_same(self) -> bool:
        """Return whether the value is unchanged since it was recorded."""
        return all(getattr(self.owner, name, Cell) is value for name, value in self.first)

    def changed(self) -> str:
        """Return the path of the value if it has changed; empty: the values are equal."""
        others = (name for name, value in self.first if _differ(value, getattr(self.owner, name, Cell)))
        return next((attribute(self.path, name) for name in others), "")

    def restore(self) -> bool:
        """Restore the recorded value; return whether that was possible."""
        for name, value in self.first:
            now = getattr(self.owner, name, Cell)
            if now is value:
                continue
            if isinstance(now, dict):  # hooks of a tensor, which autograd also holds
                now.clear()
            setattr(self.owner, name, value)
        return True


class Variable(Cell):
    """Data in a variable: a global that a function names, or a variable of an enclosing function.

    A new object that is no data, such as a log, is left alone.
    """

    __slots__ = ("get", "put", "value")

    def __init__(self, path: str, get: Callable[[], Any], put: Callable[[Any], None]) -> None:
        super().__init__(path)
        self.get, self.put, self.value = get, put, get()

    @classmethod
    def of_module(cls, path: str, now: dict[str, Any], name: str) -> "Variable":
        """Return the place of a global in the variables of its module."""
        return cls(path, partial(now.get, name), partial(now.__setitem__, name))

    @classmethod
    def of_closure(cls, path: str, now: CellType) -> "Variable":
        """Return the place of a variable of an enclosing function, which may not be filled yet."""
        return cls(path, partial(_contents, now), partial(setattr, now, "cell_contents"))

    def is_same(self) -> bool:
        """Return whether the value is unchanged since it was recorded."""
        found = self.get()
        return found is self.value or not _is_given_back(found)

    def changed(self) -> str:
        """Return the path of the value if it has changed; empty: the values are equal."""
        return self.path if _differ(self.value, self.get()) else ""

    def restore(self) -> bool:
        """Restore the recorded value; return whether that was possible."""
        if self.value is not Cell:
            self.put(self.value)
        return True


class Values(Cell):
    """The contents of a tensor or an array; None in place of a copy that would be too large."""

    __slots__ = ("first", "now", "version")

    def __init__(self, path: str, now: Any, is_kept: bool) -> None:
        super().__init__(path)
        self.now = now = _here(now)
        self.version = now._version if is_tensor(now) else 0
        self.first = (now.detach().clone() if is_tensor(now) else now.copy()) if is_kept else None

    def is_same(self) -> bool:
        """Return whether the value is unchanged since it was recorded."""
        is_written = is_tensor(self.now) and self.now._version != self.version
        return not is_written and (self.first is None or self._is_equal())

    def _is_equal(self) -> bool:
        """Return whether the contents are as recorded: a write into `tensor.data` leaves no other trace."""
        now, first = self.now, self.first
        assert first is not None
        if is_tensor(now):
            assert is_tensor(first)
            if _form(now) != _form(first):
                return False
            return bool(torch.equal(now, first) or torch.equal(torch.nan_to_num(now), torch.nan_to_num(first)))
        return bool(np.array_equal(now, first, equal_nan=now.dtype.kind in "fc"))

    def changed(self) -> str:
        """Return the path of the value if it has changed; empty: the values are equal."""
        return self.path if self.first is None or not self._is_equal() else ""

    def restore(self) -> bool:
        """Restore the recorded value; return whether that was possible."""
        if self.first is None or self.first.shape != self.now.shape or self.first.dtype != self.now.dtype:
            return False
        if is_tensor(self.now):
            with torch.no_grad():
                self.now.copy_(self.first)
            self.version = self.now._version
        else:
            self.now[...] = self.first
        return True


def _here(value: Any) -> Any:
    """Return this rank's part of a tensor: the local shard of a DTensor.

    A comparison of whole tensors needs all ranks, and some may not have the tensor.
    """
    if not is_dtensor(value):
        return value
    with torch.no_grad():
        return value.to_local()


class Drawn(Cell):
    """A random generator, or a flag of the process, or a function's cache."""

    __slots__ = ("first", "generator", "get", "put")

    def __init__(self, path: str, get: Callable[[], Any], put: Callable[[Any], Any], generator: Any = None) -> None:
        super().__init__(path)
        self.get, self.put, self.first, self.generator = get, put, get(), generator

    def is_same(self) -> bool:
        """Return whether the value is unchanged since it was recorded."""
        now = self.get()
        return bool(torch.equal(now, self.first)) if is_tensor(now) else repr(now) == repr(self.first)

    def restore(self) -> bool:
        """Restore the recorded value; return whether that was possible."""
        self.put(self.first)
        return True


class Flags(Cell):
    """The flags, shape and dtype of a tensor whose values each job loads."""

    __slots__ = ("form", "now", "requires_grad")

    def __init__(self, path: str, now: "torch.Tensor") -> None:
        super().__init__(path)
        self.now, self.requires_grad, self.form = now, now.requires_grad, _form(now)

    def is_same(self) -> bool:
        """Return whether the value is unchanged since it was recorded."""
        now = self.now
        return now.requires_grad == self.requires_grad and now.grad is None and _form(now) == self.form

    def changed(self) -> str:
        """Return the path of the value if it has changed; empty: the values are equal."""
        return self.path if self.now.requires_grad != self.requires_grad or _form(self.now) != self.form else ""

    def restore(self) -> bool:
        """Restore the recorded value; return whether that was possible."""
        if _form(self.now) != self.form:
            return False
        self.now.grad = None
        self.now.requires_grad_(self.requires_grad)
        return True


class Kind(Cell):
    """The class of an object, which code may change, as a parametrization does."""

    __slots__ = ("kind", "now")

    def __init__(self, path: str, now: Any) -> None:
        super().__init__(path)
        self.now, self.kind = now, type(now)

    def is_same(self) -> bool:
        """Return whether the value is unchanged since it was recorded."""
        return type(self.now) is self.kind

    def restore(self) -> bool:
        """Restore the recorded value; return whether that was possible."""
        try:
            self.now.__class__ = self.kind
        except TypeError:
            return False
        return True


def flags_of_process() -> Iterator[Drawn]:
    """Yield the flags of torch and numpy in this process and thread, which change a job's results."""
    backends = torch.backends
    yield Drawn("torch.set_default_dtype", torch.get_default_dtype, torch.set_default_dtype)
    yield Drawn("torch.set_grad_enabled", torch.is_grad_enabled, torch.set_grad_enabled)
    yield Drawn("torch.set_num_threads", torch.get_num_threads, torch.set_num_threads)
    yield Drawn(
        "torch.set_float32_matmul_precision", torch.get_float32_matmul_precision, torch.set_float32_matmul_precision
    )
    yield Drawn(
        "torch.use_deterministic_algorithms",
        lambda: (torch.are_deterministic_algorithms_enabled(), torch.is_deterministic_algorithms_warn_only_enabled()),
        lambda first: torch.use_deterministic_algorithms(first[0], warn_only=first[1]),
    )
    yield Drawn(
        "torch.backends.cudnn.benchmark",
        lambda: backends.cudnn.benchmark,
        lambda first: setattr(backends.cudnn, "benchmark", first),
    )
    yield Drawn("numpy.seterr", np.geterr, lambda first: np.seterr(**first))
    yield Drawn("os.chdir", os.getcwd, os.chdir)
