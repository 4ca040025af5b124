"""The stages of a Hugging Face model: copies of it with stand-ins for the modules of other stages."""

import copy
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import Any

import torch
from torch import nn

from atoll.parallel.huggingface.pipeline_plan import Calls, layers_of

INPUTS = "model_inputs"
"""The option under which each stage takes the inputs of the model."""


class StandIn(nn.Identity):
    """The stand-in for a module of another stage.

    Args:
        original: the module without values, of which a forward may read attributes, such as the dtype of a weight.
        gives: makes the output of the first argument.
    """

    def __init__(self, original: nn.Module, gives: Callable[[Any], Any]) -> None:
        super().__init__()
        self.__dict__.update(_original=original, _gives=gives)  # no module of the stage

    def __getattr__(self, name: str) -> Any:
        """Return an attribute of the original."""
        return getattr(self.__dict__.get("_original"), name)

    def forward(self, *others: Any, **named: Any) -> Any:
        """Return the output."""
        return self._gives(others[0] if others else next(iter(named.values()), None))


def without_values(module: nn.Module) -> nn.Module:
    """Return a copy whose tensors are on meta."""
    tensors = (*module.parameters(), *module.buffers())
    return copy.deepcopy(module, {id(of): of.detach().to("meta").requires_grad_(of.requires_grad) for of in tensors})


class Ends:
    """The two ends of a stage in a call of its forward: stand-ins read the one, and a hook fills the other."""

    def __init__(self) -> None:
        self._received: Any = None
        self._gave: Any = None

    def receive(self, _first: Any) -> Any:
        """Return what the stage received."""
        return self._received

    def blank(self, _first: Any) -> Any:
        """Return zeros in the form of what the stage received, or has given: the forward may write to them."""
        return torch.zeros_like(self._received if self._gave is None else self._gave)

    def bind(self, part: nn.Module, last: str | None) -> None:
        """Register the hooks.

        Args:
            part: the stage.
            last: the module whose output is handed on; None: the model's first output is.
        """
        part.register_forward_pre_hook(self._receive, with_kwargs=True)
        if last is not None:
            part.get_submodule(last).register_forward_hook(torch.compiler.disable(self._keep))  # type: ignore[no-untyped-call]
        part.register_forward_hook(self._hand_on)
        self._is_last = last is None

    def _receive(self, _part: nn.Module, inputs: tuple[Any, ...], options: dict[str, Any]) -> tuple[Any, Any]:
        (self._received,) = inputs
        return (options[INPUTS],), {}

    def _keep(self, _module: nn.Module, _inputs: Any, outputs: Any) -> None:
        self._gave = outputs[0] if isinstance(outputs, tuple) else outputs

    def _hand_on(self, _part: nn.Module, _inputs: Any, outputs: Any) -> Any:
        found = first_output(outputs) if self._is_last else self._gave
        self._received = self._gave = None  # no tensor is held from pass to pass
        return found


def put_stand_ins(part: nn.Module, model: nn.Module, found: Calls, keep: Sequence[str]) -> None:
    """Put stand-ins in place of the modules of other stages.

    Args:
        part: the stage, a copy of the model.
        model: the whole model.
        found: its calls.
        keep: the pieces of the stage.
    """
    ends, names, layers = Ends(), found.names, f"{layers_of(model)}."
    before, after = names.index(keep[0]) - 1, names.index(keep[-1]) + 1
    for index, name in enumerate(names):
        if name not in keep:
            is_blank = index < found.num_first or index == after
            gives = ends.receive if index == before else ends.blank if is_blank else _same
            length = found.length if name.startswith(layers) else 0
            original = without_values(model.get_submodule(name))
            part.set_submodule(name, StandIn(original, partial(_in_tuple, gives, length)))
    ends.bind(part, keep[-1] if after < len(names) else None)


def _same(first: Any) -> Any:
    return first


def _in_tuple(gives: Callable[[Any], Any], length: int, first: Any) -> Any:
    found = gives(first)
    return (found,) * length if length else found


def first_output(outputs: Any) -> Any:
    """Return the first of a model's outputs, such as the logits."""
    return next(iter(outputs.values())) if isinstance(outputs, Mapping) else outputs
