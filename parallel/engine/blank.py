"""A model without memory for its parameters: each rank reads the values of its boxes from a file.

Parameters are on `meta`; buffers are real, as the model makes them. (`torch.device("meta")` would lose tables that no
file has, such as the frequencies of rotary embeddings.) The engine cuts, shards and wraps the blank model; then each
rank gives memory to what it holds.
"""

from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager

import torch
from torch import nn
from torch.distributed.tensor import DTensor

from atoll.parallel.engine.records import groups_of


def blank(build: Callable[[], nn.Module]) -> nn.Module:
    """Return the model that `build` makes, with its parameters on meta.

    At most one parameter has memory at a time, unless the model's code keeps others.

    Args:
        build: () -> a module; it may draw, fill and share parameters, but no value of one may decide anything.

    Raises:
        NotImplementedError, RuntimeError: the model's code needs the values of a parameter.
    """
    with parameters_on_meta():
        return build()


def parameters_on_meta() -> AbstractContextManager[None]:
    """Put each parameter of a module on meta when it is registered. Not for several threads at once.

    A parameter that is on meta already stays the same object, so that tied weights stay tied.
    """
    return registering(on_meta)


def on_meta(parameter: nn.Parameter) -> nn.Parameter:
    """Return a parameter on the meta device, with its attributes; one that is on meta already, unchanged."""
    if parameter.is_meta:
        return parameter
    blank = nn.Parameter(parameter.detach().to("meta"), requires_grad=parameter.requires_grad)
    blank.__dict__.update(parameter.__dict__)
    return blank


@contextmanager
def registering(become: Callable[[nn.Parameter], nn.Parameter]) -> Iterator[None]:
    """Replace, in the block, each parameter that a module registers. Not for several threads at once."""
    original = nn.Module.register_parameter

    def register(self: nn.Module, name: str, parameter: nn.Parameter | None) -> None:
        original(self, name, None if parameter is None else become(parameter))

    nn.Module.register_parameter = register  # type: ignore[method-assign, assignment]
    try:
        yield
    finally:
        nn.Module.register_parameter = original  # type: ignore[method-assign]


def give_memory(parts: Sequence[nn.Module], device: torch.device | str) -> None:
    """Give memory to the parameters of this rank's parts, module by module, and NaN, which no training survives.

    The attributes of a parameter stay.

    Args:
        parts: the parts of the engine, after they were cut and wrapped.
        device: the device of the parameters.
    """
    for part in parts:
        places: dict[int, list[tuple[nn.Module, str]]] = {}
        for module in part.modules():
            for name, parameter in module._parameters.items():
                if parameter is not None and parameter.is_meta and not isinstance(parameter, DTensor):
                    places.setdefault(id(parameter), []).append((module, name))
        for module in part.modules():
            _give(module, device)
        for (first, name), *others in places.values():
            for module, other in others:  # tied: `fully_shard` ties its parameters
                module._parameters[other] = first._parameters[name]
        _pad(part)


def _pad(part: nn.Module) -> None:
    """Make `fully_shard` pad the smaller shards now.

    Else it would replace the memory of a parameter before the first pass, and an older reference to the tensor, such as
    a hook's `state_dict`, would no longer follow the parameter.
    """
    for group in groups_of(part.modules()):
        group.lazy_init()


def _give(module: nn.Module, device: torch.device | str) -> None:
    before = {name: vars(parameter) for name, parameter in module._parameters.items() if parameter is not None}
    module._apply(  # type: ignore[no-untyped-call]
        lambda tensor: _poisoned(tensor, device) if tensor.is_meta else tensor, recurse=False
    )
    for name, attributes in before.items():
        vars(module._parameters[name]).update(attributes)


def _poisoned(tensor: torch.Tensor, device: torch.device | str) -> torch.Tensor:
    """Return memory for a tensor, of NaN where its dtype has it: a share that nothing fills must be seen."""
    given = torch.empty_like(tensor, device=device)
    has_nan = given.is_floating_point() and given.element_size() > 1
    return given.fill_(torch.nan) if has_nan else given
