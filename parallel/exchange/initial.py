"""The initial values of a sharded model, made one parameter at a time: no rank ever holds the whole model.

The model is built twice: blank, for the engine, and for real, from the same seed, for the values, which equal a plain
construction's to the bit. In the second construction a parameter has memory while operations use it. When another
one is used, this rank's box of it is copied to the shards and its memory is freed:

    made, filled --> copied, freed -- filled again from nothing --> copied, freed

So one parameter is in memory at a time, also where the whole model fills its layers again at its end (Hugging
Face's `post_init`). A parameter whose values are read after they were freed has lost them: then the model is built once
more, and those parameters stay until the end.

Only what a registration shows can be followed so. A model with tensors of other kinds (copies of layers by
`copy.deepcopy`, parameters that were written into `_parameters` or moved by `Module.to`, tensors that something beside
the model holds, hooks on parameters) is built whole on each rank, and so is every small one. The shares that were
filled are counted: where one is missing, the model is built whole once more and the shares are taken from it.
"""

import gc
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import nn
from torch.distributed.checkpoint.state_dict import _get_fqns
from torch.distributed.tensor import DTensor
from torch.multiprocessing.reductions import StorageWeakRef
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from atoll.ground.process.heap import returning_freed_blocks
from atoll.parallel.engine.attached import hooks_of
from atoll.parallel.engine.blank import on_meta, registering
from atoll.parallel.exchange.shares import Share

OVERWRITING = frozenset({"normal_", "uniform_", "zero_", "fill_", "copy_", "random_", "exponential_", "bernoulli_"})
"""Operations after which nothing is left of the values of their first argument."""

CONSTRUCTIONS_MAX = 4
"""Most constructions for the values: which parameters must stay may depend on values that were lost before."""

WHOLE_MAX = 10_000_000
"""Number of elements up to which a model is built whole on each rank: 40 MB of float32."""

Build = Callable[[], nn.Module]


class NotBlank(RuntimeError):
    """A model cannot be built on the meta device, as some tensor is no registered parameter or buffer."""


class NotRepeatable(RuntimeError):
    """The second construction of a model registers other parameters than the first."""


@dataclass(frozen=True, slots=True)
class _Geometry:
    """The place of a tensor's elements in its memory."""

    shape: tuple[int, ...]
    stride: tuple[int, ...]
    offset: int

    @classmethod
    def of(cls, tensor: torch.Tensor) -> "_Geometry":
        return cls(tuple(tensor.shape), tensor.stride(), int(tensor.storage_offset()))


@dataclass(frozen=True, slots=True)
class _Place:
    """A parameter of the model in the memory of a registered one, usually all of it."""

    name: str
    """The name in the model; of a tied weight the first."""
    geometry: _Geometry
    registered: _Geometry
    """The geometry of the registered parameter, in the blank model."""

    def values(self, tensor: torch.Tensor) -> torch.Tensor:
        """Return the values of this parameter, from the registered parameter in the real model.

        Raises:
            NotRepeatable: it is a part of that memory, which the real one has in another order.
        """
        if self.geometry == self.registered:
            return tensor  # all of it, in whatever order
        if _Geometry.of(tensor) != self.registered:
            raise NotRepeatable(f"{self.name} is a view of a parameter that is not a plain tensor")
        return tensor.as_strided(self.geometry.shape, self.geometry.stride, self.geometry.offset)


@dataclass(slots=True)
class Blank:
    """A blank model, and its parameters in the order of their registration."""

    model: nn.Module
    parameters: list[nn.Parameter] = field(default_factory=list)
    """All parameters that were registered; some are no longer in the model."""
    places: list[list["_Place"]] = field(default_factory=list)
    """The parameters of the model that lie in the memory of each; none: it is no longer in the model."""
    attributes: dict[str, Any] = field(default_factory=dict)
    """The numbers and tensors among the attributes of its modules (`attributes_of`)."""


def blank_or_none(build: Build) -> Blank | None:
    """Return the model with its parameters on meta; None: it must be built whole, or is small enough for that."""
    try:
        blank = blank_of(build)
    except Exception:  # any: the model's code, with tensors that have no values; built whole, it raises the same
        return None
    return blank if sum(parameter.numel() for parameter in blank.model.parameters()) > WHOLE_MAX else None


def blank_of(build: Build) -> Blank:
    """Build a model with its parameters on meta.

    Raises:
        NotBlank: the model has tensors that registrations do not show.
        NotImplementedError, RuntimeError, TypeError: the model's code needs the values of a parameter.
    """
    found, watching = Blank(nn.Module()), _Watching()
    replaced: list[StorageWeakRef] = []

    def register(parameter: nn.Parameter) -> nn.Parameter:
        if type(parameter) is not nn.Parameter or hooks_of(parameter):
            raise NotBlank("a parameter has hooks or a custom class")
        blank = on_meta(parameter)
        if blank is not parameter:
            replaced.append(StorageWeakRef(parameter.untyped_storage()))  # type: ignore[no-untyped-call]
        if watching.follow(blank):
            found.parameters.append(blank)
        return blank

    with registering(register), watching, returning_freed_blocks():
        found.model = build()
    _place(found, watching)
    _check_held(found, watching, replaced)
    found.attributes = attributes_of(found.model)
    return found


def _place(found: Blank, watching: "_Watching") -> None:
    """Record where the model's parameters lie in the memory of registered ones.

    Raises:
        NotBlank: a parameter is not there, or has hooks.
    """
    found.places = [[] for _ in found.parameters]
    for name, parameter in found.model.named_parameters():
        number = watching.number(parameter)
        if number is None or not parameter.is_meta or hooks_of(parameter):
            raise NotBlank(f"{name} was not registered, was moved, or has hooks")
        place = _Place(name, _Geometry.of(parameter), _Geometry.of(found.parameters[number]))
        found.places[number].append(place)
    for number, places in enumerate(found.places):
        if not places:  # only its form is needed; whether anything holds its memory shows then
            found.parameters[number] = nn.Parameter(torch.empty_like(found.parameters[number]), requires_grad=False)
            watching.tensors[number] = found.parameters[number].detach()


def _check_held(found: Blank, watching: "_Watching", replaced: Sequence[StorageWeakRef]) -> None:
    """Check that nothing but the model holds a tensor that was made from its parameters.

    Raises:
        NotBlank: another object holds such a tensor.
    """
    inside = {tensor.untyped_storage()._cdata for tensor in (*found.model.parameters(), *found.model.buffers())}
    gc.collect()
    if not all(memory.expired() for memory in replaced):  # type: ignore[no-untyped-call]
        raise NotBlank("something else holds the memory of a parameter")
    if any(memory.cdata not in inside and not memory.expired() for memory in watching.made):  # type: ignore[no-untyped-call]
        raise NotBlank("something beside the model holds a tensor that was made from a parameter")


def attributes_of(model: nn.Module) -> dict[str, Any]:
    """Return the numbers, strings and tensors that modules hold beside their parameters and buffers, by name."""
    inner = vars(nn.Module()).keys()
    return {
        f"{prefix}.{name}".removeprefix("."): leaves
        for prefix, module in model.named_modules()
        for name, value in vars(module).items()
        if name not in inner
        if (leaves := [leaf for leaf in tree_leaves(value) if isinstance(leaf, int | float | complex | torch.Tensor)])
    }


def _is_same(one: Any, other: Any) -> bool:
    if isinstance(one, torch.Tensor) and isinstance(other, torch.Tensor):
        return one.is_meta or other.is_meta or (one.shape == other.shape and torch.equal(one, other))
    return bool(one == other or (one != one and other != other))


def differing_attributes(one: Mapping[str, Any], other: Mapping[str, Any]) -> list[str]:
    """Return the names of the attributes of two constructions (`attributes_of`) that have other values."""
    return [
        name
        for name in one.keys() | other.keys()
        if len(one.get(name, ())) != len(other.get(name, ())) or not all(map(_is_same, one[name], other[name]))
    ]


def fill(shares: Sequence[Share], parts: Sequence[nn.Module], blank: Blank, build: Build) -> None:
    """Fill the shards and buffers of this rank with the values with which the model is built.

    Memory: usually one parameter. No communication: every rank builds the same.

    Args:
        shares: the shares of this rank, from the engine that `blank.model` became.
        parts: the parts of the engine.
        blank: the blank model of the first construction.
        build: as for `blank_of`; it seeds the generators as for a plain construction.

    Raises:
        NotRepeatable: the model is built in another way this time; the values are undefined then.
    """
    try:
        model = _fill_by_parameter(shares, blank, build)
    except Exception:  # any: of the model's code, too, where it uses memory that was freed
        model = build()
        _fill_from(model, shares)
    _fill_buffers(model, parts)
    if drawn := differing_attributes(blank.attributes, attributes_of(model)):
        raise NotRepeatable(
            f"{', '.join(sorted(drawn)[:3])} has another value in each construction: register what is drawn as a buffer"
        )


def _fill_by_parameter(shares: Sequence[Share], blank: Blank, build: Build) -> nn.Module:
    """Fill the shares of parameters, one parameter in memory at a time; return the model, without its values.

    Raises:
        NotRepeatable: a share was not filled.
    """
    by_name: dict[str, list[Share]] = {}
    for share in shares:
        by_name.setdefault(share.name, []).append(share)
    kept: set[int] = set()
    for _ in range(CONSTRUCTIONS_MAX):
        filling = _Filling(blank, by_name, kept)
        with filling.following():
            model = build()
        filling.end(model)
        if filling.lost <= kept:
            buffers = {name for name, _ in model.named_buffers(remove_duplicate=False)}
            if missing := by_name.keys() - filling.filled - buffers:
                raise NotRepeatable(f"{', '.join(sorted(missing)[:3])} got no values")
            return model
        kept |= filling.lost
    raise NotRepeatable(f"the model's construction reads other parameters each time, {len(kept)} of them")


def _fill_from(model: nn.Module, shares: Sequence[Share]) -> None:
    """Fill the shards of this rank from a whole model.

    Raises:
        NotRepeatable: the model lacks a tensor, or has it in another shape or dtype.
    """
    tensors = dict(model.named_parameters(remove_duplicate=False)) | dict(model.named_buffers(remove_duplicate=False))
    with torch.no_grad():
        for share in shares:
            found = tensors.get(share.name)
            if found is None or (tuple(found.shape), found.dtype) != (share.shape, share.local.dtype):
                raise NotRepeatable(f"{share.name} differs from the first construction")
            share.local.copy_(found[share.slices])


class _Watching(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """The operations on the memory of some tensors, by the number of the tensor."""

    def __init__(self, filling: "_Filling | None" = None) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self._filling = filling
        self._numbers: dict[int, int] = {}
        self.tensors: list[torch.Tensor] = []
        """The tensors, which stay, so that no other memory gets the number of one."""
        self.made: list[StorageWeakRef] = []
        """The tensors without memory that operations have made in a blank construction."""

    def number(self, tensor: torch.Tensor) -> int | None:
        """Return the number of the tensor's memory; None: it is not watched."""
        return self._numbers.get(tensor.untyped_storage()._cdata)

    def follow(self, tensor: torch.Tensor) -> bool:
        """Record a tensor, whose memory is watched from now on; return whether its memory is new."""
        key = tensor.untyped_storage()._cdata
        if key in self._numbers:
            return False
        self._numbers[key] = len(self.tensors)
        self.tensors.append(tensor.detach())
        return True

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        is_view = any(r.alias_info is not None and not r.alias_info.is_write for r in func._schema.returns)
        if self._filling is not None and not is_view:
            self._filling.use(self._used(func._schema, args, kwargs or {}))
        moved = self.number(args[0]) if func._schema.name == "aten::set_" else None
        result = func(*args, **(kwargs or {}))
        if self._filling is None and not is_view:
            made = [leaf for leaf in tree_leaves(result) if isinstance(leaf, torch.Tensor) and leaf.is_meta]
            self.made += [StorageWeakRef(tensor.untyped_storage()) for tensor in made]  # type: ignore[no-untyped-call]
        if moved is not None:  # the tensor has other memory now
            self._numbers[args[0].untyped_storage()._cdata] = moved
            self.tensors[moved] = args[0].detach()
        return result

    def _used(self, schema: Any, args: Any, kwargs: Any) -> dict[int, bool]:
        """Return the numbers of the watched tensors that an operation uses, with whether it overwrites all of each."""
        tensors = [leaf for leaf in tree_leaves((args, kwargs)) if isinstance(leaf, torch.Tensor)]
        numbers = [self.number(tensor) for tensor in tensors]
        used = {number: False for number in numbers if number is not None}
        if schema.name.partition("::")[2] in OVERWRITING and numbers and (first := numbers[0]) is not None:
            is_alone = numbers.count(first) == 1
            used[first] = is_alone and tensors[0].numel() == self.tensors[first].numel()
        return used


class _Filling:
    """A second construction of the model, whose values fill the shards one parameter at a time.

    Args:
        blank: the blank model of the first construction.
        shares: the shares of this rank, by name.
        kept: the numbers of parameters that stay in memory.
    """

    def __init__(self, blank: Blank, shares: Mapping[str, Sequence[Share]], kept: set[int]) -> None:
        self._blank, self._shares, self._kept = blank, shares, kept
        self._watching = _Watching(self)
        self._open: set[int] = set()
        self.lost: set[int] = set()
        """The parameters whose values were read after they were freed."""
        self.filled: set[str] = set()
        """The names of the parameters whose shares have values."""

    @contextmanager
    def following(self) -> Iterator[None]:
        """Intercept registrations and operations while the model is built in the block, to fill the shards."""
        with registering(self._register), self._watching, returning_freed_blocks():
            yield

    def _register(self, parameter: nn.Parameter) -> nn.Parameter:
        number = len(self._watching.tensors)
        if not self._watching.follow(parameter):
            return parameter
        before = self._blank.parameters
        if number >= len(before) or (parameter.shape, parameter.dtype) != (before[number].shape, before[number].dtype):
            raise NotRepeatable(f"parameter {number} of the model differs from the first construction")
        self._close(self._open)
        self._open = {number}
        return parameter

    def use(self, used: Mapping[int, bool]) -> None:
        """Allocate the parameters that an operation uses, before it runs, and free the others."""
        if not used:
            return
        self._close(self._open - used.keys())
        self._open = set(used)
        for number, overwrites in used.items():
            tensor = self._watching.tensors[number]
            size = tensor.numel() * tensor.element_size()
            if tensor.untyped_storage().nbytes() < size:
                tensor.untyped_storage().resize_(size)
                self.lost |= set() if overwrites else {number}

    def end(self, model: nn.Module) -> None:
        """Copy the parameters that are still in memory to the shards.

        Raises:
            NotRepeatable: parameters are missing, or have other memory than in the first construction.
        """
        if len(self._watching.tensors) != len(self._blank.parameters):
            raise NotRepeatable("parameters of the model are missing this time")
        numbers = {place.name: number for number, places in enumerate(self._blank.places) for place in places}
        if numbers != {name: self._watching.number(parameter) for name, parameter in model.named_parameters()}:
            raise NotRepeatable("parameters of the model have other memory this time")
        self._close(self._open | self._kept)

    def _close(self, numbers: set[int]) -> None:
        with torch.no_grad():
            for number in numbers:
                tensor = self._watching.tensors[number]
                for place in self._blank.places[number]:
                    whole = place.values(tensor)
                    for share in self._shares.get(place.name, ()):
                        share.local.copy_(whole[share.slices])
                    self.filled.add(place.name)
                if number not in self._kept and tensor.untyped_storage().resizable():
                    tensor.untyped_storage().resize_(0)


def _fill_buffers(model: nn.Module, parts: Sequence[nn.Module]) -> None:
    """Copy all buffers, also tables that no file has: the first construction drew other numbers for them."""
    built = dict(model.named_buffers(remove_duplicate=False))
    with torch.no_grad():
        for part in parts:
            for wrapped, buffer in part.named_buffers(remove_duplicate=False):
                (name,) = _get_fqns(part, wrapped)
                if name in built:
                    (buffer.to_local() if isinstance(buffer, DTensor) else buffer).copy_(built[name])
