"""The attributes and hooks that a model's code has attached to its parameters.

The wrappers of a plan put other objects in the places of the parameters. Attributes are copied to those. A hook is
taken off and called once a step, after the sums over micro-batches and ranks and before clipping, with what it would
see in one process that trains on the whole batch at once:

    gradient of the whole batch, whole tensor --> hook --> this rank's part of the result

So a mask, a scale, a clamp or a norm gives the same on every plan; a hook that is called on a part of the sum would
not, unless it is linear. A hook may read its parameter, which has its values during the call.
"""

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn
from torch.distributed.fsdp import FSDPModule
from torch.distributed.tensor import DTensor
from torch.distributed.tensor.experimental import implicit_replication

from atoll.parallel.engine.plan import Plan
from atoll.parallel.engine.records import records_of
from atoll.parallel.engine.sharding import whole
from atoll.task.errors import TaskBroken
from atoll.task.randomness import states_of_generators
from atoll.training.optimizers.norms import local

Hook = Callable[[torch.Tensor], Any]


@dataclass(frozen=True, slots=True)
class Hooked:
    """A parameter with hooks, as the model's code made it."""

    parameter: nn.Parameter
    on_gradient: dict[int, Hook]
    """The hooks of `register_hook`."""
    on_accumulated: dict[int, Hook]
    """The hooks of `register_post_accumulate_grad_hook`."""


class Attached:
    """The attributes and hooks of a model's parameters, by all their names.

    Args:
        model: before it is cut and wrapped; its hooks are taken off where the plan calls them.
        plan: the plan of the training.
    """

    def __init__(self, model: nn.Module, plan: Plan) -> None:
        named = list(model.named_parameters(remove_duplicate=False))
        self._attributes = {name: dict(vars(parameter)) for name, parameter in named if vars(parameter)}
        calls = plan.divides or plan.is_sharded or plan.mesh.size > 1
        self._originals = [parameter for _, parameter in named]
        self._hooked: dict[str, Hooked] = {}
        self._parts: Sequence[nn.Module] = ()
        self._places: dict[int, list[tuple[nn.Module, str]]] = {}
        found: dict[int, Hooked] = {}
        for name, parameter in named if calls else ():
            if id(parameter) not in found and (hooks_of(parameter)):
                found[id(parameter)] = _taken_off(parameter)
            if id(parameter) in found:
                self._hooked[name] = found[id(parameter)]

    def put_on(self, parts: Sequence[nn.Module]) -> None:
        """Copy the original parameters' attributes to the wrapped ones, and in the first pass to the gathered ones.

        Free the original parameters that are not in these parts: code that still refers to one reads NaN.

        Args:
            parts: without the wrapper of DDP.
        """
        self._parts = parts
        here = {id(parameter) for part in parts for parameter in part.parameters()}
        for original in self._originals:
            if id(original) not in here:
                _empty(original)
        self._originals = []
        for part in parts if self._attributes else ():
            for name, parameter in part.named_parameters(remove_duplicate=False):
                vars(parameter).update(self._attributes.get(name, {}))
            for module in part.modules():
                if isinstance(module, FSDPModule):
                    # not compiled with the module; torch imports its compiler here
                    module.register_forward_pre_hook(torch.compiler.disable(_pass_on))  # type: ignore[no-untyped-call]

    @contextmanager
    def _in_place(self, own: nn.Parameter, copies: Sequence[nn.Parameter]) -> Iterator[None]:
        """Put the original parameter, in the block, in place of its copies: a hook may read it from its module."""
        places = [(*place, copy) for copy in copies if copy is not own for place in self._places.get(id(copy), ())]
        for module, name, _ in places:
            module._parameters[name] = own
        try:
            yield
        finally:
            for module, name, copy in places:
                module._parameters[name] = copy

    def call(self, parameters: Mapping[str, nn.Parameter]) -> None:
        """Call the hooks of parameters that have a gradient; the ranks of each parameter's mesh call it together.

        Args:
            parameters: the trained ones of this rank, by name.

        Raises:
            TaskBroken: a hook draws random numbers, or returns no gradient.
        """
        if not self._hooked:
            return
        self._places = {}
        for part in self._parts:
            for module in part.modules():
                for name, parameter in module._parameters.items():
                    self._places.setdefault(id(parameter), []).append((module, name))
        copies: dict[int, tuple[str, Hooked, list[nn.Parameter]]] = {}
        for name, hooked in self._hooked.items():
            parameter = parameters.get(name)
            if parameter is not None and parameter.grad is not None:
                copies.setdefault(id(hooked), (name, hooked, []))[-1].append(parameter)
        before = states_of_generators()
        for name, hooked, found in copies.values():
            with torch.no_grad(), implicit_replication(), self._in_place(hooked.parameter, found):
                _call(name, hooked, found)
        if states_of_generators() != before:
            raise TaskBroken(
                f"{', '.join(self._hooked)}: a hook draws random numbers, and each rank draws different ones: "
                "give it a generator with a fixed seed, or train in one process"
            )


def hooks_of(parameter: torch.Tensor) -> list[Hook]:
    """Return the hooks on the gradient of a parameter."""
    kinds = (parameter._backward_hooks, parameter._post_accumulate_grad_hooks)
    return [hook for hooks in kinds for hook in (hooks or {}).values()]


class _Kept:
    """A hook that no backward pass calls; the handle with which the model's code removes it stays valid."""

    def __init__(self, hook: Hook) -> None:
        self.hook = hook

    def __call__(self, _gradient: torch.Tensor) -> None:
        """Do nothing: `Attached.call` calls the hook instead."""


def _taken_off(parameter: nn.Parameter) -> Hooked:
    """Disable the hooks of a parameter in its backward passes, and return them."""
    of_tensor: Any = parameter
    hooked = Hooked(parameter, of_tensor._backward_hooks or {}, of_tensor._post_accumulate_grad_hooks or {})
    for hooks in (hooked.on_gradient, hooked.on_accumulated):
        hooks.update({key: _Kept(hook) for key, hook in hooks.items()})
    return hooked


def _kept(hooks: Mapping[int, Hook]) -> list[Hook]:
    return [kept.hook for kept in hooks.values() if isinstance(kept, _Kept)]


def _call(name: str, hooked: Hooked, copies: Sequence[nn.Parameter]) -> None:
    """Call the hooks of one parameter once; the model's object has values and gradient meanwhile.

    Args:
        name: the name of the parameter, for messages.
        hooked: the parameter as the model's code made it, with its hooks.
        copies: the wrapped parameters for it on this rank, with equal values and gradients: several if stages of this
        rank share it, of which one may be the model's object.
    """
    own, first = hooked.parameter, copies[0]
    others = [copy for copy in copies if copy is not own]
    if len(others) == len(copies):
        own.data = whole(first.detach())
    assert first.grad is not None
    given = whole(first.grad)
    for hook in _kept(hooked.on_gradient):
        returned = hook(given)
        if returned is not None:
            if not isinstance(returned, torch.Tensor) or returned.shape != given.shape:
                raise TaskBroken(f"{name}: a hook must return a gradient of {tuple(given.shape)}, or None")
            given = whole(returned)
    own.grad = given.detach()
    for hook in _kept(hooked.on_accumulated):
        hook(own)
    for copy in others:
        if own.grad is None:
            copy.grad = None
        else:
            assert copy.grad is not None
            _write(copy.grad, own.grad)
        _write(copy, own.detach())
    if len(others) == len(copies):
        _empty(own)


def _empty(own: nn.Parameter) -> None:
    """Free the memory of a parameter that is not in the wrapped model; code that reads it between calls gets NaN."""
    own.grad = None
    if not own.is_meta:
        nothing = torch.nan if own.is_floating_point() else 0
        own.data = own.detach().new_full((), nothing).expand(own.shape)


def _write(divided: torch.Tensor, whole: torch.Tensor) -> None:
    """Copy the values of a whole tensor into a divided one: into a DTensor this rank's part."""
    if not isinstance(divided, DTensor):
        divided.copy_(whole)
        return
    for box in divided.__create_chunk_list__():  # type: ignore[no-untyped-call]
        slices = tuple(slice(start, start + size) for start, size in zip(box.offsets, box.sizes, strict=True))
        local(divided).copy_(whole[slices])


def _pass_on(module: nn.Module, _inputs: Any) -> None:
    """Copy the attributes of shards to the gathered parameters; a forward pre-hook."""
    for record in records_of([module]):
        attributes = vars(record.unsharded_param)
        attributes.update({name: v for name, v in vars(record.sharded_param).items() if name not in attributes})
