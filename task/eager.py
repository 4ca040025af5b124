"""Optimizers of torch that do not import its compiler.

`Optimizer.step`, `zero_grad`, `add_param_group`, `state_dict` and `load_state_dict` import `torch._dynamo` at their
first call, to tell it where a graph ends: a second of each process, though nothing can be compiled before that import.
Until it is imported for another reason, the methods do the same without it.
"""

import functools
import sys
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    import torch

COMPILER = "torch._dynamo"
PLAIN = ("add_param_group", "zero_grad", "state_dict", "load_state_dict")


def step_without_compiler() -> None:
    """Replace methods of torch's optimizers so that they do not import `torch._dynamo`; if torch is imported.

    A method whose form differs from the known versions is left unchanged, and then imports it.
    """
    if "torch" not in sys.modules or COMPILER in sys.modules:
        return
    from torch.optim import Optimizer

    for name in PLAIN:
        _replace(Optimizer, name, _plain)
    for kind in _all_kinds(Optimizer):
        _replace(kind, "step", _step)


def _all_kinds(kind: "type[torch.optim.Optimizer]") -> "set[type[torch.optim.Optimizer]]":
    return {kind}.union(*map(_all_kinds, kind.__subclasses__()))


def _replace(
    kind: "type[torch.optim.Optimizer]",
    name: str,
    made: "Callable[[Callable[..., Any], Callable[..., Any]], Callable[..., Any]]",
) -> None:
    """Replace a method of a class by one that calls what torch has wrapped, while there is no compiler."""
    method = vars(kind).get(name)
    wrapped = getattr(method, "__wrapped__", None)
    wrapper = getattr(method, "__code__", None)
    if method is None or wrapped is None or wrapper is None or wrapper.co_name not in ("inner", "_use_grad"):
        return
    setattr(kind, name, functools.update_wrapper(made(method, wrapped), method))


def _plain(method: Callable[..., Any], wrapped: Callable[..., Any]) -> Callable[..., Any]:
    def call(*args: Any, **kwargs: Any) -> Any:
        return (method if COMPILER in sys.modules else wrapped)(*args, **kwargs)

    return call


def _step(method: Callable[..., Any], wrapped: Callable[..., Any]) -> Callable[..., Any]:
    """Return a step that records gradients only of a differentiable optimizer, as torch's step does."""

    def step(self: "torch.optim.Optimizer", *args: Any, **kwargs: Any) -> Any:
        if COMPILER in sys.modules:
            return method(self, *args, **kwargs)
        import torch

        with torch.set_grad_enabled(self.defaults["differentiable"]):
            return wrapped(self, *args, **kwargs)

    return step
