"""Serialization of an algorithm's hook state, as JSON and tensors, for checkpoints within a round.

    null, true, 1, 2.5, "text"     stand for themselves; {"float": "nan"}
    {"tensor": 3}                  the third of the checkpoint's tensors, also for a NumPy array
    {"model": NAME}                the model's present tensor of this name; {"start": NAME}: the round's first one
    {"list": [...]}, {"dict": [[key, value], ...]}, ...

No other value can be saved, nor a view that shares memory with another tensor or a tensor with an autograd graph:
the round then has no checkpoint, and starts over when a rank is lost.
"""

import math
import random
from collections import OrderedDict
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from typing import Any

import numpy as np
import torch
import torch.distributed.tensor as dtensor
from torch import nn
from torch.distributed.tensor import DTensor, Replicate, Shard

from atoll.parallel.hooks import settled
from atoll.training.model.places import is_generator

Json = dict[str, Any]
Tensors = Mapping[str, torch.Tensor]

PLAIN = (type(None), bool, int, float, str)
SEQUENCES: dict[str, Any] = {"list": list, "tuple": tuple, "set": set, "frozenset": frozenset}
MAPPINGS: dict[str, Any] = {"dict": dict, "ordered dict": OrderedDict}
BIT_GENERATORS = ("PCG64", "PCG64DXSM", "MT19937", "Philox", "SFC64")
"""The bit generators of NumPy."""

Place = tuple[Any, ...]
"""The identity of a tensor's memory and its layout there: equal for two objects that are one tensor."""


class NoForm(ValueError):
    """A value that a checkpoint cannot hold; the message names it."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Form:
    """The form of a tensor in the hook state, without values: shape, dtype, division over the mesh."""

    shape: list[int]
    dtype: str
    is_on_cpu: bool
    requires_grad: bool | None
    """The flag of a parameter; None: the tensor is no parameter."""
    like: str | None = None
    """The name of a model's tensor on the same mesh; None: the tensor is on no mesh."""
    dims: list[int | None] | None = None
    """The dimension that each axis of that mesh divides, or None; None in all: as that tensor is divided."""

    def fits(self, model: Tensors) -> bool:
        """Return whether a tensor of this form can be made on any mesh."""
        if self.like is None:
            return True
        is_of_model = list(model[self.like].shape) == self.shape
        return is_of_model if self.dims is None else not any(dim is not None for dim in self.dims)

    def empty(self, model: Tensors, device: torch.device) -> torch.Tensor:
        """Return a tensor of this form, with zeros."""
        tensor = self._zeros(None if self.like is None else model[self.like].detach(), device)
        return tensor if self.requires_grad is None else nn.Parameter(tensor, requires_grad=self.requires_grad)

    def _zeros(self, like: torch.Tensor | None, device: torch.device) -> torch.Tensor:
        dtype = getattr(torch, self.dtype)
        if like is not None and self.dims is None and list(like.shape) == self.shape:
            return torch.zeros_like(like, dtype=dtype)
        if not isinstance(like, DTensor):
            return torch.zeros(self.shape, dtype=dtype, device="cpu" if self.is_on_cpu else device)
        placements = like.placements if self.dims is None else [_placement(dim) for dim in self.dims]
        if self.dims is not None and len(self.dims) != like.device_mesh.ndim:  # another mesh, where it is whole, too
            placements = [Replicate()] * like.device_mesh.ndim
        return dtensor.zeros(self.shape, dtype=dtype, device_mesh=like.device_mesh, placements=placements)


class Writer:
    """Encoder of hook state: JSON values, and the list of tensors beside them.

    Args:
        model: what this rank has of the model's tensors now.
        start: the tensors of the start.
    """

    def __init__(self, model: Tensors, start: Tensors) -> None:
        self.tensors: list[torch.Tensor] = []
        self.forms: list[Form] = []
        self._model = model
        self._written: dict[Place, Json] = {_place(t): {"start": name} for name, t in start.items()}
        for name, tensor in model.items():
            self._written[_place(tensor)] = {"model": name, "as": "parameter"}
            self._written[_place(tensor.detach())] = {"model": name, "as": "tensor"}
        self._memory = {_place(tensor)[0] for tensor in model.values()}
        self._seen: dict[int, object] = {}

    def write(self, value: Any, where: str) -> Any:
        """Encode a value as JSON; append its tensors to the list.

        Args:
            value: the value of any type.
            where: its name in an error.

        Raises:
            NoForm: a checkpoint cannot hold the value.
        """
        if type(value) in PLAIN:
            return {"float": repr(value)} if value != value or value in (math.inf, -math.inf) else value
        if isinstance(value, torch.Tensor):
            return self._tensor(value, where)
        if isinstance(value, np.generic):
            return {"number": self._tensor(_of_array(value, where), where)}
        if id(value) in self._seen and not isinstance(value, tuple | frozenset):
            raise NoForm(f"{where} is the same object as another")
        self._seen[id(value)] = value
        if type(value) is np.ndarray:
            return {"array": self._tensor(_of_array(value, where), where)}
        return self._object(value, where)

    def _object(self, value: Any, where: str) -> Json:
        if isinstance(value, set | frozenset) and not all(type(entry) in PLAIN for entry in value):
            raise NoForm(f"{where} is a set of other things than numbers and strings")
        for name, kind in SEQUENCES.items():
            if type(value) is kind:
                entries = sorted(value, key=repr) if kind in (set, frozenset) else value
                return {name: [self.write(entry, f"{where}[{i}]") for i, entry in enumerate(entries)]}
        for name, kind in MAPPINGS.items():
            if type(value) is kind:
                keys = [self.write(key, f"a key of {where}") for key in value]
                entries = [self.write(entry, f"{where}[{key!r}]") for key, entry in value.items()]
                return {name: [list(item) for item in zip(keys, entries, strict=True)]}
        return self._generator(value, where)

    def _generator(self, value: Any, where: str) -> Json:
        if isinstance(value, torch.Generator) and value.device.type == "cpu":
            return {"generator": value.get_state().numpy().tobytes().hex()}
        if type(value) is random.Random:
            return {"random": self.write(value.getstate(), where)}
        if type(value) is np.random.Generator and is_generator(value):
            state = value.bit_generator.state
            if state["bit_generator"] in BIT_GENERATORS:
                return {"numpy generator": self.write(state, where)}
        raise NoForm(f"{where} is a {type(value).__name__}, which a checkpoint cannot hold")

    def _tensor(self, tensor: torch.Tensor, where: str) -> Json:
        place = _place(tensor)
        if place in self._written:
            return self._written[place]
        if place[0] in self._memory:
            raise NoForm(f"{where} shares its memory with another tensor, in another form")
        if type(tensor) not in (torch.Tensor, nn.Parameter, DTensor) or tensor.layout is not torch.strided:
            raise NoForm(f"{where} is a tensor of a kind that a checkpoint cannot hold")
        if tensor.grad_fn is not None or tensor.grad is not None:
            raise NoForm(f"{where} has a gradient")
        self._memory.add(place[0])
        kept = settled(tensor.detach())
        self.forms.append(self._form(kept, tensor, where))
        self.tensors.append(kept)
        self._written[place] = {"tensor": len(self.tensors) - 1}
        return self._written[place]

    def _form(self, kept: torch.Tensor, tensor: torch.Tensor, where: str) -> Form:
        is_parameter = isinstance(tensor, nn.Parameter) or tensor.requires_grad
        plain = Form(
            shape=list(kept.shape),
            dtype=str(kept.dtype).removeprefix("torch."),
            is_on_cpu=kept.device.type == "cpu",
            requires_grad=tensor.requires_grad if is_parameter else None,
        )
        return Form(**asdict(plain) | self._division(kept, where)) if isinstance(kept, DTensor) else plain

    def _division(self, tensor: DTensor, where: str) -> Json:
        there = {
            name: like
            for name, like in self._model.items()
            if isinstance(like, DTensor) and like.device_mesh == tensor.device_mesh
        }
        alike = [name for name, like in there.items() if like.placements == tensor.placements]
        if alike:
            return {"like": next((name for name in alike if there[name].shape == tensor.shape), alike[0])}
        if not there or any(type(placement) not in (Shard, Replicate) for placement in tensor.placements):
            raise NoForm(f"{where} is divided as no tensor of the model is")
        dims = [None if placement.is_replicate() else placement.dim for placement in tensor.placements]  # type: ignore[attr-defined]
        return {"like": next(iter(there)), "dims": dims}


class Reader:
    """Decoder of hook state that a `Writer` has encoded.

    Args:
        tensors: filled, in the order of `Writer.tensors`.
        model: what this rank has of the model's tensors now.
        start: the tensors of the start.
    """

    def __init__(self, tensors: list[torch.Tensor], model: Tensors, start: Tensors) -> None:
        self._tensors, self._model, self._start = tensors, model, start

    def read(self, form: Any) -> Any:
        """Decode a value from the JSON that `Writer.write` returned."""
        if not isinstance(form, dict):
            return form
        kind = next(iter(form))
        content = form[kind]
        if kind in SEQUENCES:
            return SEQUENCES[kind](self.read(entry) for entry in content)
        if kind in MAPPINGS:
            return MAPPINGS[kind]((self.read(key), self.read(entry)) for key, entry in content)
        if kind == "float":
            return float(content)
        if kind in ("array", "number"):
            return self.read(content).numpy() if kind == "array" else self.read(content).numpy()[()]
        return self._tensor(kind, form) if kind in ("tensor", "model", "start") else self._generator(kind, content)

    def _tensor(self, kind: str, form: Json) -> torch.Tensor:
        if kind == "tensor":
            return self._tensors[form[kind]]
        if kind == "start":
            return self._start[form[kind]]
        tensor = self._model[form[kind]]
        return tensor if form["as"] == "parameter" else tensor.detach()

    def _generator(self, kind: str, content: Any) -> Any:
        if kind == "generator":
            generator = torch.Generator()
            generator.set_state(torch.frombuffer(bytearray.fromhex(content), dtype=torch.uint8))
            return generator
        state = self.read(content)
        if kind == "random":
            of_python = random.Random()
            of_python.setstate(state)
            return of_python
        bits = getattr(np.random, state["bit_generator"])()
        bits.state = state
        return np.random.Generator(bits)


def _place(tensor: torch.Tensor) -> Place:
    local = tensor.to_local() if isinstance(tensor, DTensor) else tensor
    if local.layout is not torch.strided:
        return (id(tensor),)
    memory = local.untyped_storage()._cdata  # as one of no bytes has an address, too
    kind = nn.Parameter if isinstance(tensor, nn.Parameter) else torch.Tensor
    return memory, local.storage_offset(), tuple(tensor.shape), local.stride(), tensor.dtype, kind


def _placement(dim: int | None) -> Replicate | Shard:
    return Replicate() if dim is None else Shard(dim)


def _of_array(array: np.ndarray[Any, Any] | np.generic, where: str) -> torch.Tensor:
    """Return a copy of an array or a number."""
    try:
        return torch.from_numpy(np.array(array))
    except TypeError as error:
        raise NoForm(f"{where} has NumPy's dtype {array.dtype}, which a checkpoint cannot hold") from error
