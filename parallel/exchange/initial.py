"""The initial values of a sharded model, made one parameter at a time: no rank ever holds the whole model.

The model is built twice. The first time its parameters are on meta, and each operation on one of them is noted. The
second time it is real, from the same seed, so all values are those of a plain construction, to the bit. The notes say
which values are still read, and a parameter has memory only while its values are:

    filled -- overwritten later --> freed -- filled again -- read -- for the last time --> copied to the shards, freed

A module that fills its parameters in its constructor has one of them in memory at a time, also where the whole model
fills them once more at its end (Hugging Face's `post_init`).
"""

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import nn
from torch.distributed.checkpoint.state_dict import _get_fqns
from torch.distributed.tensor import DTensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from atoll.parallel.engine.blank import on_meta, registering
from atoll.parallel.exchange.shares import Share

OVERWRITING = frozenset({"normal_", "uniform_", "zero_", "fill_", "copy_", "random_", "exponential_", "bernoulli_"})
"""Operations after which nothing is left of the values of their first argument."""

Build = Callable[[], nn.Module]


class NotRepeatable(RuntimeError):
    """The second construction of the model does other things with its parameters than the first."""


@dataclass(slots=True)
class Noted:
    """A blank model, and the operations of its construction on its parameters."""

    model: nn.Module
    parameters: list[nn.Parameter] = field(default_factory=list)
    """All parameters that were registered, in their order; some are in the model no more."""
    uses: list[list[bool]] = field(default_factory=list)
    """The operations on each of them: whether it overwrites all values."""
    names: list[str | None] = field(default_factory=list)
    """The name of each of them in the model, of a tied one the first; None: it is in the model no more."""


def noted(build: Build) -> Noted:
    """Build a model with its parameters on meta, and note the operations on them.

    Raises:
        NotImplementedError, RuntimeError: the model's code needs the values of a parameter.
    """
    found = Noted(nn.Module())
    watching = _Watching()

    def register(parameter: nn.Parameter) -> nn.Parameter:
        blank = on_meta(parameter)
        if watching.follow(blank):
            found.parameters.append(blank)
            found.uses.append([])
        return blank

    watching.after = lambda number, overwrites: found.uses[number].append(overwrites)
    with registering(register), watching:
        found.model = build()
    by_id: dict[int, str] = {}
    for name, parameter in found.model.named_parameters(remove_duplicate=False):
        by_id.setdefault(id(parameter), name)
    found.names = [by_id.get(id(parameter)) for parameter in found.parameters]
    return found


def fill(shares: Sequence[Share], parts: Sequence[nn.Module], notes: Noted, build: Build) -> None:
    """Give the shards and the buffers of this rank the values that the model is built with.

    Memory: the parameters whose values are still needed, usually one. No communication: every rank builds the same.

    Args:
        shares: of this rank, from the engine that `notes.model` became.
        parts: of the engine.
        notes: of the first construction, with the same seed and settings.
        build: as for `noted`; the generators are as for a plain construction.

    Raises:
        NotRepeatable: the model is built in another way this time; some values are undefined then.
    """
    by_name: dict[str, list[Share]] = {}
    for share in shares:
        by_name.setdefault(share.name, []).append(share)
    filling = _Filling(notes, by_name)
    with registering(filling.register), filling.watching:
        model = build()
    filling.check()
    _fill_buffers(model, parts)


class _Watching(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """The operations on the memory of some tensors, by the number of the tensor."""

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self._numbers: dict[int, int] = {}
        self._sizes: list[int] = []
        self._alive: list[torch.Tensor] = []  # so that no other storage gets the number of one
        self.before: Callable[[int], None] = lambda number: None
        self.after: Callable[[int, bool], None] = lambda number, overwrites: None

    def follow(self, tensor: torch.Tensor) -> bool:
        """Watch a tensor from now on; return whether it is a new one."""
        key = tensor.untyped_storage()._cdata
        if key in self._numbers:
            return False
        self._numbers[key] = len(self._sizes)
        self._sizes.append(tensor.numel())
        self._alive.append(tensor.detach())
        return True

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        schema = func._schema
        is_view = any(r.alias_info is not None and not r.alias_info.is_write for r in schema.returns)
        used = {} if is_view else self._used(schema, args, kwargs or {})
        for number in used:
            self.before(number)
        result = func(*args, **(kwargs or {}))
        for number, overwrites in used.items():
            self.after(number, overwrites)
        return result

    def _used(self, schema: Any, args: Any, kwargs: Any) -> dict[int, bool]:
        """Return the numbers of the tensors that an operation uses, with whether it overwrites all of each."""
        tensors = [leaf for leaf in tree_leaves((args, kwargs)) if isinstance(leaf, torch.Tensor)]
        numbers = [self._numbers.get(tensor.untyped_storage()._cdata) for tensor in tensors]
        used = {number: False for number in numbers if number is not None}
        name = schema.name.partition("::")[2]
        if name in OVERWRITING and numbers and (first := numbers[0]) is not None and numbers.count(first) == 1:
            used[first] = tensors[0].numel() == self._sizes[first]
        return used


class _Filling:
    """The second construction: each parameter's memory, and the copies of its last values."""

    def __init__(self, notes: Noted, shares: Mapping[str, Sequence[Share]]) -> None:
        self._notes, self._names, self._shares = notes, notes.names, shares
        self._parameters: list[nn.Parameter] = []
        self._done: list[int] = []
        self.watching = _Watching()
        self.watching.before, self.watching.after = self._before, self._after

    def register(self, parameter: nn.Parameter) -> nn.Parameter:
        """Watch a parameter; one whose values are never used again is copied at once."""
        if self.watching.follow(parameter):
            number = len(self._parameters)
            self._parameters.append(parameter)
            self._done.append(0)
            if number >= len(self._notes.uses) or parameter.shape != self._notes.parameters[number].shape:
                raise NotRepeatable(f"parameter {number} is another one than before")
            self._rest(number)
        return parameter

    def check(self) -> None:
        """Raise NotRepeatable unless everything has happened that was noted."""
        if self._done != [len(uses) for uses in self._notes.uses]:
            raise NotRepeatable("operations on parameters are missing")

    def _before(self, number: int) -> None:
        parameter = self._parameters[number]
        storage, size = parameter.untyped_storage(), parameter.numel() * parameter.element_size()
        if storage.nbytes() < size:
            storage.resize_(size)

    def _after(self, number: int, overwrites: bool) -> None:
        uses, done = self._notes.uses[number], self._done[number]
        if done >= len(uses) or uses[done] != overwrites:
            raise NotRepeatable(f"an operation on parameter {self._names[number] or number} is another one than before")
        self._done[number] += 1
        self._rest(number)

    def _rest(self, number: int) -> None:
        """Copy the last values of a parameter, and free memory whose values are not needed any more."""
        uses, done = self._notes.uses[number], self._done[number]
        if done == len(uses):
            self._copy(number)
        if done == len(uses) or uses[done]:
            storage = self._parameters[number].untyped_storage()
            if storage.resizable():
                storage.resize_(0)

    def _copy(self, number: int) -> None:
        name = self._names[number]
        with _unwatched(self.watching), torch.no_grad():
            for share in self._shares.get(name, ()) if name is not None else ():
                share.local.copy_(self._parameters[number].detach()[share.slices])


@contextmanager
def _unwatched(watching: _Watching) -> Iterator[None]:
    before, after = watching.before, watching.after
    watching.before, watching.after = (lambda number: None), (lambda number, overwrites: None)
    try:
        yield
    finally:
        watching.before, watching.after = before, after


def _fill_buffers(model: nn.Module, parts: Sequence[nn.Module]) -> None:
    """Copy all buffers, tables that no file has among them: the first construction drew other numbers for them."""
    built = dict(model.named_buffers(remove_duplicate=False))
    with torch.no_grad():
        for part in parts:
            for wrapped, buffer in part.named_buffers(remove_duplicate=False):
                (name,) = _get_fqns(part, wrapped)
                if name in built:
                    (buffer.to_local() if isinstance(buffer, DTensor) else buffer).copy_(built[name])
